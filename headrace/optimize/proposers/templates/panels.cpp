#include "vectors.cpp"
// Products with a weight (out, in) of bfloat16, packed into panels of 16 interleaved outputs:
//
//     line   │ output 0: k, k+1 │ output 1: k, k+1 │ … │ output 15: k, k+1 │     64 bytes
//     unit   │ line of panel 0, k = 0 │ … of panel W-1, k = 0 │ of panel 0, k = 2 │ …
//     part   │ units of the first matrix │ units of the second │ …    what one thread reads, in that order
//
// No horizontal sums. Every output is one chain (two in float32: even k, odd k) of additions in order of k,
// whatever the number of rows, threads or panels: a row's result does not depend on its batch.

#ifndef HR_PANELS
#define HR_PANELS 2  // panels side by side
#endif
#ifndef HR_PREFETCH
#define HR_PREFETCH 4096  // bytes ahead
#endif
#ifndef HR_AHEAD
#define HR_AHEAD 8192  // bytes of the next matrix fetched before a barrier
#endif
#ifndef HR_UNROLL
#define HR_UNROLL 2  // pairs of k in one turn of the loop
#endif
#ifndef HR_ROWS
#define HR_ROWS 4  // rows computed together on float32
#endif
#ifndef HR_HALF_ROWS
#define HR_HALF_ROWS 8  // rows computed together on bfloat16
#endif
#ifndef HR_DOT
#define HR_DOT 1  // 1: bfloat16 rows multiply as bfloat16 pairs; 0: as float32
#endif

namespace {

constexpr int MAX_PARTS = 64;
constexpr int UNROLL = HR_UNROLL;
constexpr int GATED_PANELS = HR_PANELS < 2 ? 2 : HR_PANELS;

struct Matrix {
    int64_t out, in, pairs, units;
    int32_t panels, gated;
    int64_t at[MAX_PARTS];  // byte offset of each part's units within the packed form

    int64_t unit_bytes() const { return pairs * panels * 64; }
    int64_t first(int part, int parts) const { return units * part / parts; }
};

// ``gated``: outputs are gate rows, then up rows; a unit holds as many panels of the one as of the other
INLINE Matrix matrix_of(int64_t out, int64_t in, bool gated) {
    Matrix m = {};
    m.out = out, m.in = in, m.pairs = (in + 1) / 2, m.gated = gated;
    m.panels = gated ? GATED_PANELS : HR_PANELS;
    m.units = (out + m.panels * LANES - 1) / (m.panels * LANES);
    if (gated) m.units = (out / 2 + m.panels / 2 * LANES - 1) / (m.panels / 2 * LANES);
    return m;
}

INLINE bool is_weight(const hr_tensor &t) {
    return t.data && t.dtype == HR_BF16 && t.ndim == 2 && t.stride[1] == 1 && t.shape[0] > 0 && t.shape[1] > 0;
}

// The parts of several matrices, one part after the other; returns the end.
INLINE int64_t lay_out(Matrix **matrices, int count, int parts, int64_t offset) {
    for (int part = 0; part < parts; part++) {
        for (int i = 0; i < count; i++) {
            Matrix &m = *matrices[i];
            m.at[part] = offset;
            offset += (m.first(part + 1, parts) - m.first(part, parts)) * m.unit_bytes();
        }
        offset = (offset + 4095) / 4096 * 4096;
    }
    return offset;
}

// The output that lane ``lane`` of panel ``panel`` of a unit computes; out of range: padding.
INLINE int64_t output_of(const Matrix &m, int64_t unit, int panel, int lane) {
    if (!m.gated) return (unit * m.panels + panel) * LANES + lane;
    int half = m.panels / 2;
    int64_t within = (unit * half + panel % half) * LANES + lane;
    if (within >= m.out / 2) return m.out;
    return panel < half ? within : m.out / 2 + within;
}

INLINE void pack_matrix(const Matrix &m, const hr_tensor &weight, int parts, char *packed) {
    const uint16_t *source = (const uint16_t *)weight.data;
    for (int part = 0; part < parts; part++) {
        uint16_t *to = (uint16_t *)(packed + m.at[part]);
        for (int64_t unit = m.first(part, parts); unit < m.first(part + 1, parts); unit++) {
            for (int panel = 0; panel < m.panels; panel++)
                for (int lane = 0; lane < LANES; lane++) {
                    int64_t output = output_of(m, unit, panel, lane);
                    const uint16_t *row = output < m.out ? source + output * weight.stride[0] : nullptr;
                    uint16_t *place = to + panel * 32 + lane * 2;
                    for (int64_t pair = 0; pair < m.pairs; pair++, place += m.panels * 32) {
                        place[0] = row ? row[2 * pair] : 0;
                        place[1] = row && 2 * pair + 1 < m.in ? row[2 * pair + 1] : 0;
                    }
                }
            to += m.unit_bytes() / 2;
        }
    }
}

// What a product multiplies with: rows of float32 or of bfloat16 pairs, 0 in the last place of an odd row.
struct Operand {
    char *data;
    int64_t stride;  // bytes
    bool half;

    static size_t bytes(int64_t rows, int64_t n) { return rows * (padded(n) + LANES) * 4; }
    static Operand at(char *data, int64_t n, bool half) { return {data, (padded(n) + LANES) * (half ? 2 : 4), half}; }
    char *row(int64_t r) const { return data + r * stride; }

    // n values that start at a multiple of 16
    void put(int64_t r, int64_t at, const float *values, int64_t n) const {
        Rows{row(r), 0, half}.write(0, at, n, values);
        if ((at + n) & 1) {
            if (half) ((uint16_t *)row(r))[at + n] = 0;
            else ((float *)row(r))[at + n] = 0;
        }
    }
};

INLINE vf dot_pairs(vf acc, vu line, const char *pair) {
#ifdef __AVX512BF16__
    int32_t both;
    memcpy(&both, pair, 4);
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)line, (__m512bh)_mm512_set1_epi32(both));
#else
    uint16_t both[2];
    memcpy(both, pair, 4);
    acc = fma((vf)(line << 16), all(widen1(both[0])), acc);
    return fma((vf)(line & 0xffff0000u), all(widen1(both[1])), acc);
#endif
}

// R rows times one unit of W panels → out (R, W). Not inlined: one copy of each serves every matrix.
template <int R, int W> __attribute__((noinline)) void product_wide(const char *unit, int64_t pairs, const char *x, int64_t stride, vf *out) {
    vf even[R][W] = {}, odd[R][W] = {};
#pragma GCC unroll UNROLL
    for (int64_t pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 8
        for (int w = 0; w < W; w++) {
            vu line = load_line(unit + w * 64);
            if (HR_PREFETCH) __builtin_prefetch(unit + w * 64 + HR_PREFETCH, 0, 3);
            vf low = (vf)(line << 16), high = (vf)(line & 0xffff0000u);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const float *at = (const float *)(x + r * stride) + 2 * pair;
                even[r][w] = fma(low, all(at[0]), even[r][w]);
                odd[r][w] = fma(high, all(at[1]), odd[r][w]);
            }
        }
        unit += W * 64;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int w = 0; w < W; w++) out[r * W + w] = even[r][w] + odd[r][w];
}

template <int R, int W> __attribute__((noinline)) void product_half(const char *unit, int64_t pairs, const char *x, int64_t stride, vf *out) {
    vf acc[R][W] = {};
#pragma GCC unroll UNROLL
    for (int64_t pair = 0; pair < pairs; pair++) {
        vu line[W];
#pragma GCC unroll 8
        for (int w = 0; w < W; w++) {
            line[w] = load_line(unit + w * 64);
            if (HR_PREFETCH) __builtin_prefetch(unit + w * 64 + HR_PREFETCH, 0, 3);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int w = 0; w < W; w++) acc[r][w] = dot_pairs(acc[r][w], line[w], x + r * stride + 4 * pair);
        unit += W * 64;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int w = 0; w < W; w++) out[r * W + w] = acc[r][w];
}

// Registers hold so many sums (twice that on float32); more would spill.
constexpr int fit(int rows, int panels, int registers) { return rows * panels <= registers ? rows : registers / panels; }

typedef void (*Product)(const char *unit, int64_t pairs, const char *x, int64_t stride, vf *out);

template <int W, bool HALF, int R> constexpr Product product_of() {
    if constexpr (R > fit(HALF ? HR_HALF_ROWS : HR_ROWS, W, HALF ? 16 : 8)) return nullptr;
    else if constexpr (HALF) return product_half<R, W>;
    else return product_wide<R, W>;
}

// For 1 … 8 rows; null beyond what is computed together.
template <int W, bool HALF> struct Products {
    static constexpr Product of[9] = {nullptr, product_of<W, HALF, 1>(), product_of<W, HALF, 2>(), product_of<W, HALF, 3>(), product_of<W, HALF, 4>(),
        product_of<W, HALF, 5>(), product_of<W, HALF, 6>(), product_of<W, HALF, 7>(), product_of<W, HALF, 8>()};
};

// emit(row, unit, values[W]) for every output of the parts that belong to this thread
template <int W, class Emit>
INLINE void multiply(const Matrix &m, const char *packed, int parts, Team team, const Operand &x, int64_t rows, const Emit &emit) {
    const Product *products = x.half ? Products<W, true>::of : Products<W, false>::of;
    const int64_t together = x.half ? fit(HR_HALF_ROWS, W, 16) : fit(HR_ROWS, W, 8);
    for (int part = team.id; part < parts; part += team.count) {
        const char *unit = packed + m.at[part];
        for (int64_t index = m.first(part, parts); index < m.first(part + 1, parts); index++) {
            for (int64_t row = 0; row < rows; row += together) {
                vf out[8 * W];
                const int64_t count = rows - row < together ? rows - row : together;
                products[count](unit, m.pairs, x.row(row), x.stride, out);
                for (int64_t r = 0; r < count; r++) emit(row + r, index, out + r * W);
            }
            unit += m.unit_bytes();
        }
        for (int64_t i = 0; i < HR_AHEAD; i += 64) __builtin_prefetch(unit + HR_PREFETCH + i, 0, 2);
    }
}

// outputs [at, at + n) of one row, n <= 16
template <class Emit>
INLINE void multiply_plain(const Matrix &m, const char *packed, int parts, Team team, const Operand &x, int64_t rows, const Emit &emit) {
    multiply<HR_PANELS>(m, packed, parts, team, x, rows, [&](int64_t row, int64_t unit, vf *values) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int w = 0; w < HR_PANELS; w++) {
            int64_t at = (unit * HR_PANELS + w) * LANES, left = m.out - at;
            if (left > 0) emit(row, at, left < LANES ? left : LANES, values[w]);
        }
    });
}

// act(gate) * up, likewise
template <class Emit>
INLINE void multiply_gated(const Matrix &m, const char *packed, int parts, Team team, const Operand &x, int64_t rows, const float *bias, int64_t kind, const Emit &emit) {
    constexpr int HALF = GATED_PANELS / 2;
    const int64_t n = m.out / 2;
    multiply<GATED_PANELS>(m, packed, parts, team, x, rows, [&](int64_t row, int64_t unit, vf *values) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int w = 0; w < HALF; w++) {
            int64_t at = (unit * HALF + w) * LANES, left = n - at;
            if (left <= 0) continue;
            vf gate = values[w], up = values[HALF + w];
            if (bias) gate += load(bias + at), up += load(bias + padded(n) + at);
            emit(row, at, left < LANES ? left : LANES, activate(gate, kind) * up);
        }
    });
}

// The two halves of a gated bias, each padded to whole vectors.
INLINE void widen_gated_bias(const hr_tensor &t, float *to) {
    hr_tensor half = t;
    half.shape[0] = t.shape[0] / 2;
    widen_vector(half, 0, to);
    half.data = (char *)t.data + half.shape[0] * (t.dtype == HR_BF16 ? 2 : 4);
    widen_vector(half, 0, to + padded(half.shape[0]));
}

// Reserves room for a weight vector of ``t`` when it is there.
INLINE int64_t reserve(const hr_tensor &t, int64_t &end) {
    if (!t.data) return 0;
    int64_t at = end;
    end += (padded(t.shape[0]) + 4 * LANES) * 4;  // a gated bias is padded twice
    return at;
}
INLINE void pack_vector(char *packed, int64_t at, const hr_tensor &t, double offset) {
    if (at) widen_vector(t, (float)offset, (float *)(packed + at));
}
INLINE const float *vector_at(const void *packed, int64_t at) {
    return at ? (const float *)((const char *)packed + at) : nullptr;
}
INLINE bool is_vector_or_absent(const hr_tensor &t, int64_t n) { return !t.data || is_vector(t, n); }

INLINE int parts_of(const hr_call *call) {
    return call->threads < 1 ? 1 : call->threads > MAX_PARTS ? MAX_PARTS : call->threads;
}

}  // namespace
