// A module that works row by row: element by element, sums and extremes over a row, products with weights.
// The stages and what they keep are written by the search; this is how they run:
//
//   by blocks    a thread takes HR_BLOCK_ROWS rows through all stages; what is between stays in its cache
//   by columns   all rows go through a stage together; products are split by columns
#include "modules/common.cpp"

// @EMITTED

namespace {

thread_local Scratch shared, own;

void run_blocks(const Call &call, int threads) {
    const int64_t blocks = (ROWS + HR_BLOCK_ROWS - 1) / HR_BLOCK_ROWS;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * HR_BLOCK_ROWS, last = std::min<int64_t>(ROWS, first + HR_BLOCK_ROWS);
        float *memory = own.get(HR_BLOCK_ROWS * BUFFER_COLUMNS);
        Buffers buffers;
        place_all(buffers, memory, HR_BLOCK_ROWS, first);
        all_stages(call, buffers, first, last);
    }
}

void run_columns(const Call &call, int threads) {
    float *common = shared.get(ROWS * BUFFER_COLUMNS);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
        Buffers buffers;
        place_all(buffers, common, ROWS, 0);
        place_private(buffers, own.get(ROWS * BUFFER_COLUMNS), ROWS);
        sliced_stages(call, buffers, self, team);
    }
}

}  // namespace

extern "C" int hr_run(const hr_call *call) {
    Call here(call);
    const int threads = HR_THREADS ? std::min<int>(HR_THREADS, call->threads) : call->threads;
    if (HR_BY_COLUMNS)
        run_columns(here, threads);
    else
        run_blocks(here, threads);
    return HR_DONE;
}
