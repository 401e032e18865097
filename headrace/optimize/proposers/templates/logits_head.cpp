#include "panels.cpp"
// An output head: float32 logits, soft-capped when the model does so.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif

namespace {

struct Pack {
    int64_t parts, bytes, bias;
    Matrix weight;
};

INLINE bool lay_out_head(const hr_call *call, Pack &pack) {
    const hr_tensor &weight = call->tensors[S_weight], &bias = call->tensors[S_bias];
    if (!is_weight(weight) || (bias.data && !is_vector(bias, weight.shape[0]))) return false;
    pack = {};
    pack.parts = parts_of(call);
    pack.weight = matrix_of(weight.shape[0], weight.shape[1], false);
    int64_t end = (sizeof(Pack) + 63) / 64 * 64;
    if (bias.data) pack.bias = end, end += padded(weight.shape[0]) * 4;
    Matrix *order[] = {&pack.weight};
    pack.bytes = lay_out(order, 1, (int)pack.parts, (end + 4095) / 4096 * 4096);
    return true;
}

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    Pack pack;
    return lay_out_head(call, pack) ? pack.bytes : -1;
}

extern "C" int hr_pack(const hr_call *call, void *to) {
    Pack pack;
    if (!lay_out_head(call, pack)) return HR_NOT_MINE;
    memcpy(to, &pack, sizeof pack);
    pack_matrix(pack.weight, call->tensors[S_weight], (int)pack.parts, (char *)to);
    if (pack.bias) widen_vector(call->tensors[S_bias], 0, (float *)((char *)to + pack.bias));
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    if (!call->packed) return HR_NOT_MINE;
    const Pack &pack = *(const Pack *)call->packed;
    const char *packed = (const char *)call->packed;
    const hr_tensor &x = call->tensors[S_x], &out = call->tensors[S_out];
    if (!is_rows(x) || x.ndim != 2 || !is_rows(out) || out.ndim != 2 || out.dtype != HR_F32) return HR_NOT_MINE;
    const int64_t rows = x.shape[0], in = pack.weight.in;
    if (rows < 1 || rows > HR_MAX_ROWS || x.shape[1] != in) return HR_NOT_MINE;
    if (out.shape[0] != rows || out.shape[1] != pack.weight.out) return HR_NOT_MINE;
    const int threads = call->threads > 0 ? call->threads : 1;
    const Rows from = rows_of(x), to = rows_of(out);
    const float cap = (float)call->floats[F_softcap], *bias = pack.bias ? (const float *)(packed + pack.bias) : nullptr;
    const size_t operand = Operand::bytes(rows, in), own = (operand + (padded(in) + LANES) * 4 + 4095) / 4096 * 4096;
    char *memory = scratch.reserve(own * threads);
    if (!memory) return 2;
    run_team(threads, [&](Team team) {
        char *mine = memory + own * team.id;
        // logits in bfloat16 would tie at the top: a row's own rounding is all that is lost
        const Operand h = Operand::at(mine, in, HR_DOT && from.half);
        float *room = (float *)(mine + operand);
        for (int64_t row = 0; row < rows; row++) from.read(row, 0, in, room), h.put(row, 0, room, in);
        multiply_plain(pack.weight, packed, (int)pack.parts, team, h, rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            if (bias) v += load(bias + at);
            if (cap > 0) v = cap * hyperbolic_tangent(v / cap);
            if (n == LANES) store((float *)to.data + row * to.stride + at, v);
            else {
                float part[LANES];
                store(part, v);
                to.write(row, at, n, part);
            }
        });
    });
    return HR_DONE;
}
