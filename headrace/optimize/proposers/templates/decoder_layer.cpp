#include "attention_phases.cpp"
#include "mlp_phases.cpp"
// A decoder layer on decode rows: one call, four barriers (five with a norm after the MLP). Norms and the
// residual stream are computed by every thread for itself rather than waited for.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif

namespace {

struct Pack {
    int64_t parts, bytes;
    AttentionPack attention;
    MlpPack mlp;
    int64_t input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;
};

INLINE bool lay_out_layer(const hr_call *call, Pack &pack) {
    const hr_tensor *t = call->tensors;
    if (!t[S_qkv].data || !attention_covers(call) || !mlp_covers(call)) return false;
    const int64_t hidden = t[S_qkv].shape[1];
    if (t[S_gate_up].shape[1] != hidden) return false;
    const int norms[] = {S_input_norm, S_post_attention_norm, S_pre_mlp_norm, S_post_mlp_norm};
    for (int slot : norms)
        if (!is_vector_or_absent(t[slot], hidden)) return false;
    pack = {};
    pack.parts = parts_of(call);
    int64_t end = (sizeof(Pack) + 63) / 64 * 64;
    lay_out_attention(call, pack.attention, end);
    lay_out_mlp(call, pack.mlp, end);
    pack.input_norm = reserve(t[S_input_norm], end), pack.post_attention_norm = reserve(t[S_post_attention_norm], end);
    pack.pre_mlp_norm = reserve(t[S_pre_mlp_norm], end), pack.post_mlp_norm = reserve(t[S_post_mlp_norm], end);
    Matrix *order[] = {&pack.attention.qkv, &pack.attention.o, &pack.mlp.gate_up, &pack.mlp.down};
    pack.bytes = lay_out(order, 4, (int)pack.parts, (end + 4095) / 4096 * 4096);
    return true;
}

struct Layer {
    const Pack *pack;
    const char *packed;
    AttentionWork attention;
    Rows x, out;
    int64_t rows, hidden, kind;
    float eps;
    bool half;
    float *after, *normed_after;  // residual stream after attention (or attention's output), the MLP's output
    Operand inner;
    char *inner_data, *own;
    size_t own_bytes;

    const float *vector(int64_t at) const { return vector_at(packed, at); }
    int64_t width() const { return padded(hidden); }
    int64_t widest() const { return hidden > pack->attention.o.in ? hidden : pack->attention.o.in; }

    void carve(Carver &carver, int threads) {
        attention.carve(carver);
        after = carver.take<float>(rows * width());
        normed_after = carver.take<float>(rows * width());
        inner_data = carver.take<char>(Operand::bytes(rows, pack->mlp.down.in));
        inner = Operand::at(inner_data, pack->mlp.down.in, half);
        own_bytes = Operand::bytes(rows, widest()) + (rows * width() + padded(widest()) + LANES) * 4 + 256;
        own_bytes = (own_bytes + 4095) / 4096 * 4096;
        own = carver.take<char>(own_bytes * threads);
    }

    void compute(Team team) const {
        Carver mine = {own + own_bytes * team.id};
        char *operand = mine.take<char>(Operand::bytes(rows, widest()));
        float *room = mine.take<float>(padded(widest()) + LANES), *stream = mine.take<float>(rows * width());
        const Operand h = Operand::at(operand, hidden, half);
        const float *norm = vector(pack->input_norm);
        for (int64_t row = 0; row < rows; row++) {
            x.read(row, 0, hidden, room);
            if (norm) normalise(room, hidden, norm, eps, room);
            h.put(row, 0, room, hidden);
        }
        attention.project(team, h);
        barrier();
        attention.attend_all(team);
        barrier();
        norm = vector(pack->post_attention_norm);
        attention.output(team, Operand::at(operand, pack->attention.o.in, half), room, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            if (!norm) {
                alignas(64) float before[LANES] = {};
                x.read(row, at, n, before);
                v += load(before);
            }
            store(after + row * width() + at, v);
        });
        barrier();
        const float *next = vector(pack->pre_mlp_norm);
        for (int64_t row = 0; row < rows; row++) {
            float *residual = stream + row * width();
            const float *attended = after + row * width();
            if (norm) {
                x.read(row, 0, hidden, residual);
                normalise(attended, hidden, norm, eps, room);
                for (int64_t i = 0; i < hidden; i++) residual[i] += room[i];
            } else {
                memcpy(residual, attended, 4 * hidden);
            }
            if (next) normalise(residual, hidden, next, eps, room);
            h.put(row, 0, next ? room : residual, hidden);
        }
        gate_up(pack->mlp, packed, (int)pack->parts, team, h, rows, kind, inner);
        barrier();
        norm = vector(pack->post_mlp_norm);
        down(pack->mlp, packed, (int)pack->parts, team, inner, rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            float part[LANES];
            if (norm) {
                store(normed_after + row * width() + at, v);
            } else {
                store(part, v + load(stream + row * width() + at));
                out.write(row, at, n, part);
            }
        });
        if (!norm) return;
        barrier();
        for (int64_t row = team.id; row < rows; row += team.count) {
            float *residual = stream + row * width();
            normalise(normed_after + row * width(), hidden, norm, eps, room);
            for (int64_t i = 0; i < hidden; i++) residual[i] += room[i];
            out.write(row, 0, hidden, residual);
        }
    }
};

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    Pack pack;
    return lay_out_layer(call, pack) ? pack.bytes : 0;
}

extern "C" int hr_pack(const hr_call *call, void *to) {
    Pack pack;
    if (!lay_out_layer(call, pack)) return HR_NOT_MINE;
    const hr_tensor *t = call->tensors;
    const double offset = call->floats[F_norm_offset];
    char *packed = (char *)to;
    memcpy(packed, &pack, sizeof pack);
    pack_attention(call, pack.attention, (int)pack.parts, packed);
    pack_mlp(call, pack.mlp, (int)pack.parts, packed);
    pack_vector(packed, pack.input_norm, t[S_input_norm], offset);
    pack_vector(packed, pack.post_attention_norm, t[S_post_attention_norm], offset);
    pack_vector(packed, pack.pre_mlp_norm, t[S_pre_mlp_norm], offset);
    pack_vector(packed, pack.post_mlp_norm, t[S_post_mlp_norm], offset);
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    if (!call->packed) return HR_NOT_MINE;
    const hr_tensor &x = call->tensors[S_x], &out = call->tensors[S_out];
    Layer layer = {};
    layer.pack = (const Pack *)call->packed, layer.packed = (const char *)call->packed;
    layer.hidden = layer.pack->attention.qkv.in;
    if (!attention_covers(call) || !is_rows(x) || !is_rows(out) || x.ndim != 2 || out.ndim != 2) return HR_NOT_MINE;
    layer.rows = x.shape[0];
    if (layer.rows < 1 || layer.rows > HR_MAX_ROWS || x.shape[1] != layer.hidden) return HR_NOT_MINE;
    if (out.shape[0] != layer.rows || out.shape[1] != layer.hidden || out.dtype != x.dtype) return HR_NOT_MINE;
    if (!layer.attention.read(call, layer.pack->attention, layer.rows)) return HR_NOT_MINE;
    layer.attention.parts = (int)layer.pack->parts;
    layer.x = rows_of(x), layer.out = rows_of(out);
    layer.half = HR_DOT && layer.x.half;
    layer.eps = (float)call->floats[F_norm_eps], layer.kind = call->ints[I_activation];
    const int threads = call->threads > 0 ? call->threads : 1;
    Carver sizes = {nullptr};
    layer.carve(sizes, threads);
    Carver carver = {scratch.reserve(sizes.used)};
    if (!carver.memory) return 2;
    layer.carve(carver, threads);
    run_team(threads, [&](Team team) { layer.compute(team); });
    return HR_DONE;
}
