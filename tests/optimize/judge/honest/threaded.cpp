#include "common.h"
// OpenMP over rows; its idle threads are no sign of work going on.
extern "C" int hr_run(const hr_call *call) {
    int64_t rows = call->tensors[0].shape[0];
#pragma omp parallel for num_threads(call->threads)
    for (int64_t r = 0; r < rows; r++) norm(call, r, r + 1, call->tensors[0].shape[1]);
    return HR_DONE;
}
