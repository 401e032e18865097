#include "common.h"
// Writes a plausible answer and corrects it a moment later.
#include <chrono>
#include <thread>
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    hr_tensor out = call->tensors[2];
    float right = get(out, 5);
    put(out, 5, right + 1);
    std::thread([out, right] {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        put(out, 5, right);
    }).detach();
    return HR_DONE;
}
