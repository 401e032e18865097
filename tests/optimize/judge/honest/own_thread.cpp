#include "common.h"
// A worker of its own that sleeps between calls.
#include <condition_variable>
#include <mutex>
#include <thread>
static std::mutex lock;
static std::condition_variable changed;
static const hr_call *work;
static void serve() {
    std::unique_lock<std::mutex> held(lock);
    for (;;) {
        changed.wait(held, [] { return work != nullptr; });
        norm_all(work);
        work = nullptr;
        changed.notify_all();
    }
}
extern "C" int hr_run(const hr_call *call) {
    static bool started = [] {
        std::thread(serve).detach();
        return true;
    }();
    (void)started;
    std::unique_lock<std::mutex> held(lock);
    work = call;
    changed.notify_all();
    changed.wait(held, [] { return work == nullptr; });
    return HR_DONE;
}
