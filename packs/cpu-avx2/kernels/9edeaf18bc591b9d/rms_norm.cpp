// x / sqrt(mean(x²) + eps) * (offset + weight), rows on their own.
#include "weights.h"

namespace {

enum { S_x, S_weight, S_out };
enum { F_eps, F_offset };

constexpr int64_t WORTH_A_TEAM = 16384;  // numbers

}  // namespace

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
    const hr_tensor &x = call->tensors[S_x], &out = call->tensors[S_out];
    if (!call->packed || x.dtype != HR_F32 || out.dtype != HR_F32 || !is_rows(x) || !is_rows(out)) return HR_NOT_MINE;
    if (x.ndim != 2 || out.ndim != 2 || x.shape[0] < 1 || x.shape[1] != *(const int64_t *)call->packed) return HR_NOT_MINE;
    if (out.shape[0] != x.shape[0] || out.shape[1] != x.shape[1]) return HR_NOT_MINE;
    const int64_t rows = x.shape[0], n = x.shape[1];
    const float *gain = (const float *)((const char *)call->packed + 64), eps = (float)call->floats[F_eps];
    run_team(rows * n < WORTH_A_TEAM ? 1 : call->threads, [&](Team team) {
        for (int64_t row = rows * team.id / team.count; row < rows * (team.id + 1) / team.count; row++)
            normalise((const float *)x.data + row * x.stride[0], n, gain, eps, (float *)out.data + row * out.stride[0]);
    });
    return HR_DONE;
}
