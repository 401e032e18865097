#include "panels.cpp"
// One packed weight with its bias: what linear, gated_linear and logits_head have in common.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif
#ifndef HR_GATED
#define HR_GATED 0
#endif

namespace {

struct Pack {
    int64_t parts, bytes, bias;
    Matrix weight;
};

INLINE bool lay_out_weight(const hr_call *call, Pack &pack) {
    const hr_tensor &weight = call->tensors[S_weight], &bias = call->tensors[S_bias];
    if (!is_weight(weight) || (bias.data && !is_vector(bias, weight.shape[0]))) return false;
    if (HR_GATED && weight.shape[0] % 2) return false;
    pack = {};
    pack.parts = parts_of(call);
    pack.weight = matrix_of(weight.shape[0], weight.shape[1], HR_GATED);
    int64_t end = (sizeof(Pack) + 63) / 64 * 64;
    if (bias.data) pack.bias = end, end += (padded(weight.shape[0]) + 4 * LANES) * 4;
    Matrix *order[] = {&pack.weight};
    pack.bytes = lay_out(order, 1, (int)pack.parts, (end + 4095) / 4096 * 4096);
    return true;
}

// A call on the packed weight: rows of x, and each thread's room for them as the product's operand.
struct Product1 {
    const Pack *pack;
    const char *packed;
    Rows x, out;
    int64_t rows;
    int threads;
    const float *bias;
    char *memory;
    size_t operand_bytes, own;

    // false: not a call that this covers
    bool read(const hr_call *call, int64_t width, int out_dtype) {
        const hr_tensor &from = call->tensors[S_x], &to = call->tensors[S_out];
        if (!call->packed || !is_rows(from) || from.ndim != 2 || !is_rows(to) || to.ndim != 2) return false;
        pack = (const Pack *)call->packed, packed = (const char *)call->packed;
        rows = from.shape[0];
        if (rows < 1 || rows > HR_MAX_ROWS || from.shape[1] != pack->weight.in) return false;
        if (to.shape[0] != rows || to.shape[1] != width || to.dtype != out_dtype) return false;
        x = rows_of(from), out = rows_of(to);
        threads = call->threads > 0 ? call->threads : 1;
        bias = pack->bias ? (const float *)(packed + pack->bias) : nullptr;
        operand_bytes = (Operand::bytes(rows, pack->weight.in) + 63) / 64 * 64;
        own = (operand_bytes + (padded(pack->weight.in) + LANES) * 4 + 4095) / 4096 * 4096;
        return true;
    }
    bool reserve() { return (memory = scratch.reserve(own * threads)) != nullptr; }

    Operand operand(Team team) const {
        char *mine = memory + own * team.id;
        const Operand to = Operand::at(mine, pack->weight.in, HR_DOT && x.half);
        float *room = (float *)(mine + operand_bytes);
        for (int64_t row = 0; row < rows; row++) x.read(row, 0, pack->weight.in, room), to.put(row, 0, room, pack->weight.in);
        return to;
    }
};

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    Pack pack;
    return lay_out_weight(call, pack) ? pack.bytes : 0;
}

extern "C" int hr_pack(const hr_call *call, void *to) {
    Pack pack;
    if (!lay_out_weight(call, pack)) return HR_NOT_MINE;
    memcpy(to, &pack, sizeof pack);
    pack_matrix(pack.weight, call->tensors[S_weight], (int)pack.parts, (char *)to);
    float *bias = (float *)((char *)to + pack.bias);
    if (pack.bias && HR_GATED) widen_gated_bias(call->tensors[S_bias], bias);
    else if (pack.bias) widen_vector(call->tensors[S_bias], 0, bias);
    return HR_DONE;
}
