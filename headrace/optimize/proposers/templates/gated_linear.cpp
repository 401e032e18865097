#define HR_GATED 1
#include "single_weight.cpp"
// act(x @ gate.T) * (x @ up.T)

extern "C" int hr_run(const hr_call *call) {
    Product1 p = {};
    if (!call->packed || !p.read(call, ((const Pack *)call->packed)->weight.out / 2, call->tensors[S_x].dtype)) return HR_NOT_MINE;
    if (!p.reserve()) return 2;
    run_team(p.threads, [&](Team team) {
        const Operand x = p.operand(team);
        multiply_gated(p.pack->weight, p.packed, (int)p.pack->parts, team, x, p.rows, p.bias, call->ints[I_activation], [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            float part[LANES];
            store(part, v);
            p.out.write(row, at, n, part);
        });
    });
    return HR_DONE;
}
