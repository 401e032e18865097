#include "single_weight.cpp"
// An output head: float32 logits, soft-capped when the model does so.

extern "C" int hr_run(const hr_call *call) {
    Product1 p = {};
    if (!call->packed || !p.read(call, ((const Pack *)call->packed)->weight.out, HR_F32)) return HR_NOT_MINE;
    if (!p.reserve()) return 2;
    const float cap = (float)call->floats[F_softcap];
    run_team(p.threads, [&](Team team) {
        const Operand x = p.operand(team);
        multiply_plain(p.pack->weight, p.packed, (int)p.pack->parts, team, x, p.rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            if (p.bias) v += load(p.bias + at);
            if (cap > 0) v = cap * hyperbolic_tangent(v / cap);
            if (n == LANES) {
                store((float *)p.out.data + row * p.out.stride + at, v);
            } else {
                float part[LANES];
                store(part, v);
                p.out.write(row, at, n, part);
            }
        });
    });
    return HR_DONE;
}
