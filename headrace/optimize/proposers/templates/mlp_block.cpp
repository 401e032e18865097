#include "mlp_phases.cpp"
// down(act(gate) * up) + residual: one call, one barrier.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif

namespace {

struct Pack {
    int64_t parts, bytes;
    MlpPack mlp;
};

INLINE bool lay_out_block(const hr_call *call, Pack &pack) {
    if (!mlp_covers(call)) return false;
    pack = {};
    pack.parts = parts_of(call);
    int64_t end = (sizeof(Pack) + 63) / 64 * 64;
    lay_out_mlp(call, pack.mlp, end);
    Matrix *order[] = {&pack.mlp.gate_up, &pack.mlp.down};
    pack.bytes = lay_out(order, 2, (int)pack.parts, (end + 4095) / 4096 * 4096);
    return true;
}

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    Pack pack;
    return lay_out_block(call, pack) ? pack.bytes : 0;
}

extern "C" int hr_pack(const hr_call *call, void *to) {
    Pack pack;
    if (!lay_out_block(call, pack)) return HR_NOT_MINE;
    memcpy(to, &pack, sizeof pack);
    pack_mlp(call, pack.mlp, (int)pack.parts, (char *)to);
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &from = call->tensors[S_x], &to = call->tensors[S_out], &added = call->tensors[S_residual];
    if (!call->packed || !is_rows(from) || from.ndim != 2 || !is_rows(to) || to.ndim != 2) return HR_NOT_MINE;
    const Pack &pack = *(const Pack *)call->packed;
    const char *packed = (const char *)call->packed;
    const int64_t rows = from.shape[0], hidden = pack.mlp.gate_up.in, width = pack.mlp.down.in, kind = call->ints[I_activation];
    if (rows < 1 || rows > HR_MAX_ROWS || from.shape[1] != hidden) return HR_NOT_MINE;
    if (to.shape[0] != rows || to.shape[1] != hidden || to.dtype != from.dtype) return HR_NOT_MINE;
    if (added.data && (!is_rows(added) || added.ndim != 2 || added.shape[0] != rows || added.shape[1] != hidden)) return HR_NOT_MINE;
    const Rows x = rows_of(from), out = rows_of(to), residual = rows_of(added);
    const bool half = HR_DOT && x.half;
    const int threads = call->threads > 0 ? call->threads : 1;
    const size_t inner_bytes = (Operand::bytes(rows, width) + 63) / 64 * 64, operand = (Operand::bytes(rows, hidden) + 63) / 64 * 64;
    const size_t own = (operand + (padded(hidden) + LANES) * 4 + 4095) / 4096 * 4096;
    char *memory = scratch.reserve(inner_bytes + own * threads);
    if (!memory) return 2;
    run_team(threads, [&](Team team) {
        char *mine = memory + inner_bytes + own * team.id;
        const Operand h = Operand::at(mine, hidden, half), inner = Operand::at(memory, width, half);
        float *room = (float *)(mine + operand);
        for (int64_t row = 0; row < rows; row++) x.read(row, 0, hidden, room), h.put(row, 0, room, hidden);
        gate_up(pack.mlp, packed, (int)pack.parts, team, h, rows, kind, inner);
        barrier();
        down(pack.mlp, packed, (int)pack.parts, team, inner, rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            float part[LANES] = {};
            if (residual.data) {
                residual.read(row, at, n, part);
                v += load(part);
            }
            store(part, v);
            out.write(row, at, n, part);
        });
    });
    return HR_DONE;
}
