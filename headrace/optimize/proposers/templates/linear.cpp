#include "single_weight.cpp"
// x @ weight.T + bias + residual

extern "C" int hr_run(const hr_call *call) {
    Product1 p = {};
    if (!call->packed || !p.read(call, ((const Pack *)call->packed)->weight.out, call->tensors[S_x].dtype)) return HR_NOT_MINE;
    const hr_tensor &added = call->tensors[S_residual];
    if (added.data && (!is_rows(added) || added.ndim != 2 || added.shape[0] != p.rows || added.shape[1] != p.pack->weight.out)) return HR_NOT_MINE;
    const Rows residual = rows_of(added);
    if (!p.reserve()) return 2;
    run_team(p.threads, [&](Team team) {
        const Operand x = p.operand(team);
        multiply_plain(p.pack->weight, p.packed, (int)p.pack->parts, team, x, p.rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            float part[LANES] = {};
            if (p.bias) v += load(p.bias + at);
            if (residual.data) {
                residual.read(row, at, n, part);
                v += load(part);
            }
            store(part, v);
            p.out.write(row, at, n, part);
        });
    });
    return HR_DONE;
}
