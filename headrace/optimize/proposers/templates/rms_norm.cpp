#include "vectors.cpp"
// x / sqrt(mean(x²) + eps) * (offset + weight). Small rows: threads only from 64 KB on.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    const hr_tensor &weight = call->tensors[S_weight];
    return is_rows(weight) && weight.ndim == 1 ? 64 + padded(weight.shape[0]) * 4 : 0;
}

extern "C" int hr_pack(const hr_call *call, void *packed) {
    const hr_tensor &weight = call->tensors[S_weight];
    if (!is_rows(weight) || weight.ndim != 1) return HR_NOT_MINE;
    *(int64_t *)packed = weight.shape[0];
    widen_vector(weight, (float)call->floats[F_offset], (float *)((char *)packed + 64));
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &from = call->tensors[S_x], &to = call->tensors[S_out];
    if (!call->packed || !is_rows(from) || from.ndim != 2 || !is_rows(to) || to.ndim != 2) return HR_NOT_MINE;
    const int64_t rows = from.shape[0], n = from.shape[1];
    if (rows < 1 || rows > HR_MAX_ROWS || n != *(const int64_t *)call->packed) return HR_NOT_MINE;
    if (to.shape[0] != rows || to.shape[1] != n || to.dtype != from.dtype) return HR_NOT_MINE;
    const float *gain = (const float *)((const char *)call->packed + 64), eps = (float)call->floats[F_eps];
    const Rows x = rows_of(from), out = rows_of(to);
    const int threads = rows * n < 16384 || call->threads < 1 ? 1 : call->threads;
    const size_t own = (padded(n) * 4 + 64) / 64 * 64;
    char *memory = scratch.reserve(own * threads);
    if (!memory) return 2;
    run_team(threads, [&](Team team) {
        float *room = (float *)(memory + own * team.id);
        for (int64_t row = team.id; row < rows; row += team.count) {
            x.read(row, 0, n, room);
            normalise(room, n, gain, eps, room);
            out.write(row, 0, n, room);
        }
    });
    return HR_DONE;
}
