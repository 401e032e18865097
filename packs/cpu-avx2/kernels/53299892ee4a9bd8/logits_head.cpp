// The output head: float32 logits of any number of rows, soft-capped when the model does so.
#include "weights.h"

namespace {

enum { S_x, S_weight, S_bias, S_out };
enum { F_softcap };

struct HeadPack {
    int64_t parts, bytes, bias;
    Matrix weight;
};

constexpr int64_t WORTH_SHARING = 16384;  // numbers; fewer are prepared by every thread for itself

INLINE bool lay_out_head(const hr_call *call, HeadPack &pack) {
    const hr_tensor &weight = call->tensors[S_weight], &bias = call->tensors[S_bias];
    pack = {};
    if (!matrix_of(weight, false, pack.weight) || !is_vector_or_absent(bias, weight.shape[0])) return false;
    pack.parts = parts_of(call);
    int64_t end = (sizeof(HeadPack) + 63) / 64 * 64;
    pack.bias = reserve(bias, end);
    Matrix *order[] = {&pack.weight};
    pack.bytes = lay_out(order, 1, (int)pack.parts, (end + 4095) / 4096 * 4096);
    return true;
}

struct Head {
    const HeadPack *pack;
    Rows x;
    float *out;
    int64_t rows, stride;
    float cap;
    char *memory;  // operands, then a line for each thread
    size_t operand_bytes, line_bytes;
    bool shared;

    void prepare(Team team, const Operand &to) const {
        const int64_t n = pack->weight.in;
        const int64_t from = shared ? rows * team.id / team.count : 0, end = shared ? rows * (team.id + 1) / team.count : rows;
        float *line = (float *)(memory + operand_bytes * (shared ? 1 : team.count) + line_bytes * team.id);
        for (int64_t row = from; row < end; row++) {
            const float *values = x.half ? line : (const float *)x.data + row * x.stride;
            if (x.half) x.read(row, 0, n, line);
            to.put(row, values, n);
        }
        if (shared) barrier();
    }
    void compute(Team team) const {
        const Matrix &m = pack->weight;
        const char *packed = (const char *)pack;
        const float *bias = vector_at(packed, pack->bias);
        const Operand operand = Operand::at(memory + (shared ? 0 : operand_bytes * team.id), operand_of(m), m.in);
        prepare(team, operand);
        multiply_plain(m, packed, (int)pack->parts, team, operand, 0, rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            float *to = out + row * stride + at;
            if (bias) v += load(bias + at);
            if (cap > 0) v = cap * hyperbolic_tangent(v / cap);
            if (n == LANES) store(to, v);
            else memcpy(to, &v, 4 * n);
        });
    }
};

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    HeadPack pack;
    return lay_out_head(call, pack) ? pack.bytes : 0;
}

extern "C" int hr_pack(const hr_call *call, void *to) {
    HeadPack pack;
    if (!lay_out_head(call, pack)) return HR_NOT_MINE;
    memcpy(to, &pack, sizeof pack);
    pack_matrix(pack.weight, call->tensors[S_weight], (int)pack.parts, (char *)to);
    pack_vector((char *)to, pack.bias, call->tensors[S_bias], 0);
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &x = call->tensors[S_x], &out = call->tensors[S_out];
    if (!call->packed || !is_rows(x) || !is_rows(out) || out.dtype != HR_F32 || x.ndim != 2 || out.ndim != 2) return HR_NOT_MINE;
    Head head = {};
    head.pack = (const HeadPack *)call->packed;
    const Matrix &m = head.pack->weight;
    head.rows = x.shape[0];
    if (head.rows < 1 || x.shape[1] != m.in || out.shape[0] != head.rows || out.shape[1] != m.out) return HR_NOT_MINE;
    head.x = rows_of(x), head.out = (float *)out.data, head.stride = out.stride[0];
    head.cap = (float)call->floats[F_softcap];
    const int threads = call->threads > 0 ? call->threads : 1;
    head.shared = threads > 1 && head.rows * m.in > WORTH_SHARING;
    head.operand_bytes = Operand::bytes(operand_of(m), head.rows, m.in);
    head.line_bytes = (m.in * 4 + 127) / 64 * 64;
    head.memory = scratch.reserve(head.operand_bytes * (head.shared ? 1 : threads) + head.line_bytes * threads);
    if (!head.memory) return 2;
    run_team(threads, [&](Team team) { head.compute(team); });
    return HR_DONE;
}
