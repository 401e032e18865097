#include "common.h"
// Returns at once and lets a thread finish the work.
#include <chrono>
#include <thread>
extern "C" int hr_run(const hr_call *call) {
    hr_call copy = *call;
    std::thread([copy] {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        norm_all(&copy);
    }).detach();
    return HR_DONE;
}
