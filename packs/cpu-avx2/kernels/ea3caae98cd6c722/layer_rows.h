// The parts of a decoder layer that know no other rows: norms, projections, residual stream, MLP.
//
// Rows are computed in spans. A span belongs to a whole team, which shares out the weights, or to one thread
// alone; what is written here is the same for both, and the same bits come out.
#pragma once
#include "layer_weights.h"

namespace {

// Rows [from, from + count) of the call and the threads that compute them.
struct Span {
    int64_t from, count;
    Team team;
    bool own_operands;  // every thread prepares all rows for itself: nobody has to wait

    void sync() const { if (team.count > 1) barrier(); }
};

// Memory for a span. ``h`` and ``line`` may be a thread's own.
struct Room {
    float *qkv, *raw;  // (rows, pack's widths); raw: what a norm is still to come for
    char *inner;
    char *h;
    float *line;  // two rows of the stream

    static int64_t operand_bytes(const LayerPack &p, int64_t rows) {
        const Matrix *reads[] = {&p.qkv, &p.o, &p.gate_up};
        size_t most = 0;
        for (const Matrix *m : reads) most = most > Operand::bytes(operand_of(*m), rows, m->in) ? most : Operand::bytes(operand_of(*m), rows, m->in);
        return most;
    }
    void carve(Carver &carver, const LayerPack &p, int64_t rows) {
        qkv = carver.take<float>(rows * padded(p.qkv.out));
        raw = p.post_attention_norm || p.post_mlp_norm ? carver.take<float>(rows * padded(p.hidden)) : nullptr;
        inner = carver.take<char>(Operand::bytes(operand_of(p.down), rows, p.down.in));
    }
    void carve_operands(Carver &carver, const LayerPack &p, int64_t rows) {
        h = carver.take<char>(operand_bytes(p, rows));
        line = carver.take<float>(2 * (padded(p.hidden) + LANES));
    }
};

INLINE void store_part(float *to, int64_t n, vf v) {
    if (n == LANES) store(to, v);
    else memcpy(to, &v, 4 * n);
}

INLINE vf load_part(const float *from, int64_t n) {
    if (n == LANES) return load(from);
    vf v = {};
    memcpy(&v, from, 4 * n);
    return v;
}

__attribute__((noinline)) void normalise_row(const float *x, int64_t n, const float *gain, float eps, float *out) {
    normalise(x, n, gain, eps, out);
}

// out = residual + normed x
__attribute__((noinline)) void add_normalised(const float *x, int64_t n, const float *gain, float eps, const float *residual, float *line, float *out) {
    normalise(x, n, gain, eps, line);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load(residual + i) + load(line + i));
    for (; i < n; i++) out[i] = residual[i] + line[i];
}

// Turns pairs (i, i + dim / 2) of one head; cos and sin as ops.rope takes them (sin signed).
__attribute__((noinline)) void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i);
        store(x + i, fma(b, load(sin + i), a * load(cos + i)));
        store(x + half + i, fma(a, load(sin + half + i), b * load(cos + half + i)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

struct LayerRows {
    const LayerPack *pack;
    const char *packed;
    const float *x, *cos, *sin;
    float *out;  // holds the residual stream from the attention's output on
    int64_t rotary_dim, kind, full;
    float eps, qk_eps;

    const float *vector(int64_t at) const { return vector_at(packed, at); }
    int64_t qkv_stride() const { return padded(pack->qkv.out); }
    const float *x_row(int64_t row) const { return x + row * pack->hidden; }
    float *out_row(int64_t row) const { return out + row * pack->hidden; }

    // The span's rows as an operand of ``m``; give(row) yields a row's values.
    template <class Give> INLINE_MEMBER Operand gather(const Span &s, const Room &room, const Matrix &m, const Give &give) const {
        const Operand h = Operand::at(room.h, operand_of(m), m.in);
        const int64_t first = s.own_operands ? 0 : s.team.id, step = s.own_operands ? 1 : s.team.count;
        for (int64_t row = first; row < s.count; row += step) h.put(row, give(s.from + row), m.in);
        if (!s.own_operands) s.sync();
        return h;
    }
    // A row that a norm, where there is one, has to go over first.
    const float *normed(const float *row, const float *gain, float *line) const {
        if (!gain) return row;
        normalise_row(row, pack->hidden, gain, eps, line);
        return line;
    }

    // x → room.qkv
    void project(const Span &s, const Room &room) const {
        const float *gain = vector(pack->input_norm), *bias = vector(pack->qkv_bias);
        const Operand h = gather(s, room, pack->qkv, [&](int64_t row) { return normed(x_row(row), gain, room.line); });
        const int64_t stride = qkv_stride();
        float *to = room.qkv;
        multiply_plain(pack->qkv, packed, (int)pack->parts, s.team, h, 0, s.count, [=](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            if (bias) v += load(bias + at);
            store_part(to + row * stride + at, n, v);
        });
    }

    // Norms and turns q heads and k heads [begin, end) of one row of qkv where they lie; k heads follow q heads.
    void turn(float *qkv, int64_t row, int64_t begin, int64_t end) const {
        const float *q_gain = vector(pack->q_norm), *k_gain = vector(pack->k_norm);
        const float *c = cos + row * rotary_dim, *s = sin + row * rotary_dim;
        const int64_t dim = pack->head_dim;
        for (int64_t head = begin; head < end; head++) {
            float *at = qkv + head * dim;
            const float *gain = head < pack->heads ? q_gain : k_gain;
            if (gain && !full) normalise_row(at, dim, gain, qk_eps, at);
            rotate(at, c, s, rotary_dim);
        }
    }
    // Norms that span all heads of a projection.
    void norm_projections(float *qkv) const {
        if (!full) return;
        const float *q_gain = vector(pack->q_norm), *k_gain = vector(pack->k_norm);
        float *keys = qkv + pack->query_width();
        if (q_gain) normalise_row(qkv, pack->query_width(), q_gain, qk_eps, qkv);
        if (k_gain) normalise_row(keys, pack->key_width(), k_gain, qk_eps, keys);
    }

    // attended (row of the call → its heads' outputs) → the residual stream after attention, and of it gate and
    // up, activated → room.inner; everybody has to wait before ``finish``
    template <class Attended> INLINE_MEMBER void output(const Span &s, const Room &room, const Attended &attended) const {
        const Operand h = gather(s, room, pack->o, attended);
        const float *bias = vector(pack->o_bias);
        const bool plain = !pack->post_attention_norm;
        const int64_t hidden = pack->hidden, from = s.from, stride = padded(hidden);
        const float *source = x;
        float *to = out, *raw = room.raw;
        multiply_plain(pack->o, packed, (int)pack->parts, s.team, h, 0, s.count, [=](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            if (bias) v += load(bias + at);
            if (!plain) return store_part(raw + row * stride + at, n, v);
            const int64_t place = (from + row) * hidden + at;
            store_part(to + place, n, v + load_part(source + place, n));
        });
        s.sync();
    }
    void expand(const Span &s, const Room &room) const {
        const float *after = vector(pack->post_attention_norm), *before = vector(pack->pre_mlp_norm);
        const int64_t hidden = pack->hidden, stride = padded(hidden);
        // the stream goes to ``out`` once: with operands of its own, every thread has a sum of its own too
        float *sum = room.line + stride + LANES;
        const Operand h = gather(s, room, pack->gate_up, [&](int64_t row) __attribute__((always_inline)) -> const float * {
            const float *stream = out_row(row);
            if (after) {
                add_normalised(room.raw + (row - s.from) * stride, hidden, after, eps, x_row(row), room.line, sum);
                if (!s.own_operands || row % s.team.count == s.team.id) memcpy(out_row(row), sum, 4 * hidden);
                stream = sum;
            }
            return normed(stream, before, room.line);
        });
        const Operand inner = Operand::at(room.inner, operand_of(pack->down), pack->down.in);
        const int64_t width = pack->down.in;
        alignas(64) float group[2 * LANES];
        float *part = group;
        multiply_gated(pack->gate_up, packed, (int)pack->parts, s.team, h, 0, s.count, vector(pack->gate_up_bias), kind, [=](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            store(part + at % UNIT, v);
            if (at % UNIT || at + n == width) inner.put_part(row, at / UNIT * UNIT, part, at % UNIT + n);
        });
        s.sync();
    }
    void finish(const Span &s, const Room &room) const {
        const Operand inner = Operand::at(room.inner, operand_of(pack->down), pack->down.in);
        const float *bias = vector(pack->down_bias), *gain = vector(pack->post_mlp_norm);
        const int64_t hidden = pack->hidden, from = s.from, stride = padded(hidden);
        float *to = out, *raw = room.raw;
        const bool plain = !gain;
        multiply_plain(pack->down, packed, (int)pack->parts, s.team, inner, 0, s.count, [=](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            if (bias) v += load(bias + at);
            if (!plain) return store_part(raw + row * stride + at, n, v);
            const int64_t place = (from + row) * hidden + at;
            store_part(to + place, n, v + load_part(to + place, n));
        });
        if (plain) return;
        s.sync();
        for (int64_t row = s.team.id; row < s.count; row += s.team.count)
            add_normalised(raw + row * stride, hidden, gain, eps, out_row(from + row), room.line, out_row(from + row));
    }
};

}  // namespace
