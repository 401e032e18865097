#include "attention_phases.cpp"
// An attention block on decode rows: one call, two barriers.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif

namespace {

struct Pack {
    int64_t parts, bytes;
    AttentionPack attention;
};

INLINE bool lay_out_block(const hr_call *call, Pack &pack) {
    if (!call->tensors[S_qkv].data || !attention_covers(call)) return false;
    pack = {};
    pack.parts = parts_of(call);
    int64_t end = (sizeof(Pack) + 63) / 64 * 64;
    lay_out_attention(call, pack.attention, end);
    Matrix *order[] = {&pack.attention.qkv, &pack.attention.o};
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
    pack_attention(call, pack.attention, (int)pack.parts, (char *)to);
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &from = call->tensors[S_x], &to = call->tensors[S_out], &added = call->tensors[S_residual];
    if (!call->packed || !attention_covers(call) || !is_rows(from) || from.ndim != 2 || !is_rows(to) || to.ndim != 2) return HR_NOT_MINE;
    const Pack &pack = *(const Pack *)call->packed;
    const int64_t rows = from.shape[0], hidden = pack.attention.qkv.in, width = pack.attention.o.in;
    if (rows < 1 || rows > HR_MAX_ROWS || from.shape[1] != hidden) return HR_NOT_MINE;
    if (to.shape[0] != rows || to.shape[1] != hidden || to.dtype != from.dtype) return HR_NOT_MINE;
    if (added.data && (!is_rows(added) || added.ndim != 2 || added.shape[0] != rows || added.shape[1] != hidden)) return HR_NOT_MINE;
    AttentionWork work = {};
    if (!work.read(call, pack.attention, rows)) return HR_NOT_MINE;
    work.parts = (int)pack.parts;
    const Rows x = rows_of(from), out = rows_of(to), residual = rows_of(added);
    const bool half = HR_DOT && x.half;
    const int threads = call->threads > 0 ? call->threads : 1;
    const int64_t widest = hidden > width ? hidden : width;
    const size_t operand = (Operand::bytes(rows, widest) + 63) / 64 * 64, own = (operand + (padded(widest) + LANES) * 4 + 4095) / 4096 * 4096;
    Carver sizes = {nullptr};
    work.carve(sizes), sizes.take<char>(own * threads);
    Carver carver = {scratch.reserve(sizes.used)};
    if (!carver.memory) return 2;
    work.carve(carver);
    char *rooms = carver.take<char>(own * threads);
    run_team(threads, [&](Team team) {
        char *mine = rooms + own * team.id;
        float *room = (float *)(mine + operand);
        const Operand h = Operand::at(mine, hidden, half);
        for (int64_t row = 0; row < rows; row++) x.read(row, 0, hidden, room), h.put(row, 0, room, hidden);
        work.project(team, h);
        barrier();
        work.attend_all(team);
        barrier();
        work.output(team, Operand::at(mine, width, half), room, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
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
