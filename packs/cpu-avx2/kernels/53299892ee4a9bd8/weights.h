// Products with a layer's weights, laid out for reading: what every kernel of this folder multiplies with.
//
// A weight (out, in) is cut into bands of rows of one format, a band into units of 32 outputs. A unit is read
// from its first byte to its last, and all units of one thread lie one behind the other, in the order in which
// a step reads its matrices:
//
//     part   │ units of the first matrix │ units of the second │ …     what one thread reads at decode
//     gated  │ gate unit, up unit │ gate unit, up unit │ …             32 outputs of act(gate) * up each
//
// ---- what a format brings (product_bf16.h, product_blocks.h): a Product ----
//
//     unit_bytes(in)       bytes of a packed unit, a multiple of 64
//     pack(rows, in, unit) 32 rows as the checkpoint stores them → a unit of zeroed memory; rows[i] null: padding,
//                          whose outputs are never emitted
//     narrow(rows, unit, in, x, stride, out)
//                          1 … few rows times a unit as packed, when a step has no more rows than that: bound
//                          by reading, so it prefetches PREFETCH bytes ahead (what lies there is read next;
//                          prefetcht1, locality 2: at bf16 and 8 rows 28 GB/s a thread, against 24 with 3)
//     wide(rows, unit, in, x, stride, out)
//                          1 … tile rows times a unit of many-row steps: in the form that expand() makes of it
//                          where there is one (expanded_bytes not null), else as packed. It comes from the
//                          second-level cache and is used for every tile of rows.
//     x, stride            row r of the operand starts at x + r * stride, 64-byte aligned; PAIRS: bfloat16,
//                          zeros from `in` to the next multiple of 16; GROUPS: as product_blocks.h puts it
//     out                  out[2 * r], out[2 * r + 1]: outputs 0 … 15 and 16 … 31 of row r
//
// Every output is one chain of additions in one order of k: the same bits from narrow and wide, for any number
// of rows. product_blocks.h defines
//
//     const Product *blocks_product(int64_t format)                    null: a format it does not know
//     int64_t groups_stride(int64_t n)                                 bytes of a GROUPS row of n values, a multiple of 64
//     void put_groups(char *row, int64_t n, int64_t at, const float *values, int64_t count)
//                          values [at, at + count) of a row, whole groups of 32 (the last of a row may be
//                          short: the rest counts as zeros)
#pragma once
#include "vectors.h"

namespace {

#ifndef HR_PREFETCH
#define HR_PREFETCH 32768
#endif

constexpr int UNIT = 32;
constexpr int64_t PREFETCH = HR_PREFETCH;  // bytes ahead, into the second-level cache: rows stay in the first
constexpr int MAX_TILE = 16;

enum OperandKind { PAIRS, GROUPS };

struct Product {
    OperandKind kind;
    int32_t elements;  // `in` must be a multiple of it
    int32_t few, tile;  // at most MAX_TILE
    int64_t (*unit_bytes)(int64_t in);
    void (*pack)(const char *const *rows, int64_t in, char *unit);
    void (*narrow)(int rows, const char *unit, int64_t in, const char *x, int64_t stride, vf *out);
    void (*wide)(int rows, const char *unit, int64_t in, const char *x, int64_t stride, vf *out);
    int64_t (*expanded_bytes)(int64_t in);  // null: wide takes the packed unit
    void (*expand)(const char *unit, int64_t in, char *to);
};

}  // namespace

#include "product_bf16.h"
#ifndef HR_WITHOUT_BLOCKS
#include "product_blocks.h"
#else  // bf16 weights alone: compiles in a fraction of the time
namespace {
INLINE const Product *blocks_product(int64_t) { return nullptr; }
INLINE int64_t groups_stride(int64_t n) { return (n + 63) / 64 * 64; }
INLINE void put_groups(char *, int64_t, int64_t, const float *, int64_t) {}
}  // namespace
#endif

namespace {

constexpr int MAX_PARTS = 64;
constexpr int MAX_BANDS = 4;
constexpr int64_t NEAR_BYTES = 448 << 10;  // of units that many rows are computed on before the next are read
constexpr int64_t AHEAD_BYTES = 8192;      // of the next matrix, fetched before a barrier

INLINE const Product *product_of(int64_t format) { return format == HR_BF16_ROWS ? &BF16_PRODUCT : blocks_product(format); }

// ---- a weight's layout: plain data, kept in the packed form ----

struct Band {
    int64_t format, first, rows;  // outputs [first, first + rows)
    int64_t unit, units;          // of the matrix's units; both halves of a gated one have the same
    int64_t unit_bytes, offset;   // offset: from the matrix's first unit, were all parts one
};

struct Matrix {
    int64_t out, in, units, outputs;  // outputs: out, or half of it when gated
    int32_t kind, gated, num_bands, unused;
    Band band[MAX_BANDS];
    int64_t at[MAX_PARTS];  // byte offset of each part's units within the packed form

    int64_t first(int part, int parts) const { return units * part / parts; }

    // where a unit would be if all parts were one; unit may be `units`: the end
    int64_t place(int64_t unit) const {
        if (gated) return unit * (band[0].unit_bytes + band[1].unit_bytes);
        int i = 0;
        while (i + 1 < num_bands && unit >= band[i + 1].unit) i++;
        return band[i].offset + (unit - band[i].unit) * band[i].unit_bytes;
    }
    int part_of(int64_t unit, int parts) const {
        int part = (int)(unit * parts / units);
        while (unit >= first(part + 1, parts)) part++;
        while (unit < first(part, parts)) part--;
        return part;
    }
    const char *address(const char *packed, int64_t unit, int parts) const {
        int part = part_of(unit, parts);
        return packed + at[part] + place(unit) - place(first(part, parts));
    }
};

INLINE OperandKind operand_of(const Matrix &m) { return (OperandKind)m.kind; }

INLINE bool is_weight(const hr_tensor &t) {
    if (!t.data || t.ndim != 2 || t.shape[0] < 1 || t.shape[1] < 1) return false;
    return t.dtype == HR_BLOCKS || (t.dtype == HR_BF16 && t.stride[1] == 1);
}

// What stores a weight's row: its format, its bytes.
struct WeightRow {
    int64_t format;
    const char *data;
};
INLINE int64_t block_row_bytes(int64_t format, int64_t in) {
    switch (format) {
        case HR_Q4_0: return in / 32 * 18;
        case HR_Q4_1: return in / 32 * 20;
        case HR_Q8_0: return in / 32 * 34;
        case HR_Q4_K: return in / 256 * 144;
        case HR_Q5_K: return in / 256 * 176;
        case HR_Q6_K: return in / 256 * 210;
        case HR_BF16_ROWS: return in * 2;
    }
    return 0;
}
INLINE WeightRow weight_row(const hr_tensor &t, int64_t row) {
    if (t.dtype == HR_BF16) return {HR_BF16_ROWS, (const char *)t.data + row * t.stride[0] * 2};
    const hr_blocks *blocks = (const hr_blocks *)t.data;
    for (int64_t i = 0; i < blocks->num_parts; i++) {
        const hr_part &part = blocks->part[i];
        if (row < part.rows) return {part.format, (const char *)t.data + part.offset + row * block_row_bytes(part.format, t.shape[1])};
        row -= part.rows;
    }
    return {-1, nullptr};
}

// false: not covered. ``gated``: the weight is gate rows, then as many up rows.
INLINE bool matrix_of(const hr_tensor &weight, bool gated, Matrix &m) {
    m = {};
    if (!is_weight(weight) || (gated && weight.shape[0] % 2)) return false;
    m.out = weight.shape[0], m.in = weight.shape[1], m.gated = gated;
    m.outputs = gated ? m.out / 2 : m.out;
    for (int64_t row = 0; row < m.out;) {
        const int64_t format = weight_row(weight, row).format;
        const Product *product = product_of(format);
        if (!product || m.in % product->elements || m.num_bands == MAX_BANDS) return false;
        if (m.num_bands && m.kind != product->kind) return false;
        m.kind = product->kind;
        Band &band = m.band[m.num_bands++];
        band.format = format, band.first = row, band.unit_bytes = product->unit_bytes(m.in);
        const int64_t end = gated && row < m.outputs ? m.outputs : m.out;
        while (row < end && weight_row(weight, row).format == format) row++;
        band.rows = row - band.first, band.units = (band.rows + UNIT - 1) / UNIT;
        if (gated && band.rows != m.outputs) return false;
        band.unit = gated ? 0 : m.units;
        m.units = band.unit + band.units;
        if (m.num_bands == 1) continue;
        const Band &before = m.band[m.num_bands - 2];
        band.offset = before.offset + before.units * before.unit_bytes;
    }
    return true;
}

// The parts of several matrices, one part after the other; returns the end.
INLINE int64_t lay_out(Matrix **matrices, int count, int parts, int64_t offset) {
    offset = (offset + 63) / 64 * 64;
    for (int part = 0; part < parts; part++) {
        for (int i = 0; i < count; i++) {
            Matrix &m = *matrices[i];
            m.at[part] = offset;
            offset += m.place(m.first(part + 1, parts)) - m.place(m.first(part, parts));
        }
        offset = (offset + 4095) / 4096 * 4096;
    }
    return offset;
}

INLINE void pack_unit(const Band &band, const hr_tensor &weight, int64_t unit, char *to) {
    const char *rows[UNIT];
    for (int i = 0; i < UNIT; i++) {
        const int64_t row = (unit - band.unit) * UNIT + i;
        rows[i] = row < band.rows ? weight_row(weight, band.first + row).data : nullptr;
    }
    product_of(band.format)->pack(rows, weight.shape[1], to);
}

// On as many threads as there are parts.
INLINE void pack_matrix(const Matrix &m, const hr_tensor &weight, int parts, char *packed) {
    run_team(parts, [&](Team team) {
        for (int64_t unit = m.units * team.id / team.count; unit < m.units * (team.id + 1) / team.count; unit++) {
            char *to = (char *)m.address(packed, unit, parts);
            int i = 0;
            while (!m.gated && i + 1 < m.num_bands && unit >= m.band[i + 1].unit) i++;
            pack_unit(m.band[i], weight, unit, to);
            if (m.gated) pack_unit(m.band[1], weight, unit, to + m.band[0].unit_bytes);
        }
    });
}

// ---- rows prepared for products with a matrix of that kind ----

struct Operand {
    char *data;
    int64_t stride, n;  // stride in bytes
    OperandKind kind;

    static int64_t row_bytes(OperandKind kind, int64_t n) {
        const int64_t lines = kind == PAIRS ? pairs_stride(n) / 64 : groups_stride(n) / 64;
        return (lines | 1) * 64;  // odd: rows do not fall onto the same sets of the cache
    }
    static size_t bytes(OperandKind kind, int64_t rows, int64_t n) { return rows * row_bytes(kind, n); }
    static Operand at(char *memory, OperandKind kind, int64_t n) { return {memory, row_bytes(kind, n), n, kind}; }
    char *row(int64_t r) const { return data + r * stride; }

    void put(int64_t r, const float *values, int64_t count) const { put_part(r, 0, values, count); }
    // PAIRS: at a multiple of 16; GROUPS: at a multiple of 32, whole groups. Only a row's last part may be of
    // another length.
    void put_part(int64_t r, int64_t at, const float *values, int64_t count) const {
        if (kind == PAIRS) put_pairs(row(r), at, values, count);
        else put_groups(row(r), n, at, values, count);
    }
};

// ---- the products ----

thread_local Scratch expansion;

// The units of one band (of both halves of a gated matrix, alternately) that lie behind each other in one part.
struct Stretch {
    const char *units;  // the first one
    int64_t in, count, first;  // first: its number in the matrix
    int halves;
    const Product *product[2];
    int64_t step, half[2];                // packed: bytes from unit to unit, offset of each half
    int64_t wide_step, wide_half[2], room;  // expanded; 0: nothing to expand

    static Stretch of(const Matrix &m, const Band *band, const char *units, int64_t from, int64_t to) {
        Stretch s = {units, m.in, to - from, from, m.gated ? 2 : 1, {}, 0, {}, 0, {}, 0};
        for (int h = 0; h < s.halves; h++) {
            s.product[h] = product_of(band[h].format);
            s.half[h] = s.step, s.wide_half[h] = s.wide_step;
            s.step += band[h].unit_bytes;
            if (s.product[h]->expanded_bytes) s.wide_step += (s.product[h]->expanded_bytes(m.in) + 63) / 64 * 64;
        }
        return s;
    }
    void narrow(int64_t unit, int rows, const char *x, int64_t stride, vf (*out)[2 * MAX_TILE]) const {
        for (int h = 0; h < halves; h++) product[h]->narrow(rows, units + unit * step + half[h], in, x, stride, out[h]);
    }
    void expand(int64_t unit, char *to) const {
        for (int h = 0; h < halves; h++)
            if (product[h]->expanded_bytes) product[h]->expand(units + unit * step + half[h], in, to + wide_half[h]);
    }
    void wide(int64_t unit, const char *expanded, int rows, const char *x, int64_t stride, vf (*out)[2 * MAX_TILE]) const {
        for (int h = 0; h < halves; h++)
            product[h]->wide(rows, product[h]->expanded_bytes ? expanded + wide_half[h] : units + unit * step + half[h], in, x, stride, out[h]);
    }
    int few() const { return halves == 2 && product[1]->few < product[0]->few ? product[1]->few : product[0]->few; }
    int tile() const { return halves == 2 && product[1]->tile < product[0]->tile ? product[1]->tile : product[0]->tile; }
};

// work(stretch) for units [from, to) of one part, band after band
template <class Work> INLINE void each_stretch(const Matrix &m, const char *packed, int parts, int64_t from, int64_t to, const Work &work) {
    for (int i = 0; i < (m.gated ? 1 : m.num_bands); i++) {
        const Band &band = m.band[i];
        int64_t begin = from > band.unit ? from : band.unit, end = to < band.unit + band.units ? to : band.unit + band.units;
        if (begin < end) work(Stretch::of(m, &band, m.address(packed, begin, parts), begin, end), band);
    }
}

// ``tiles`` tiles of rows [0, rows), as equal as can be
INLINE int64_t tile_start(int64_t rows, int64_t tiles, int64_t tile) { return rows * tile / tiles; }

// All of a stretch times tiles [tile, last): as many units as stay near, times one tile after the other.
template <class Take>
INLINE void multiply_wide(const Stretch &s, const Operand &x, int64_t from, int64_t rows, int64_t tiles, int64_t tile, int64_t last, const Take &take) {
    int64_t together = NEAR_BYTES / (s.wide_step ? s.wide_step : s.step);
    if (together < 1) together = 1;
    if (together > s.count) together = s.count;
    char *room = s.wide_step ? expansion.reserve(together * s.wide_step) : nullptr;
    const bool short_of_memory = s.wide_step && !room;
    vf out[2][2 * MAX_TILE];
    for (int64_t begin = 0; begin < s.count; begin += together) {
        const int64_t end = begin + together < s.count ? begin + together : s.count;
        if (room)
            for (int64_t unit = begin; unit < end; unit++) s.expand(unit, room + (unit - begin) * s.wide_step);
        for (int64_t t = tile; t < last; t++) {
            const int64_t row = from + tile_start(rows, tiles, t), stop = from + tile_start(rows, tiles, t + 1);
            for (int64_t unit = begin; unit < end; unit++) {
                if (!short_of_memory) {
                    s.wide(unit, room + (unit - begin) * s.wide_step, (int)(stop - row), x.row(row), x.stride, out);
                    take(row, (int)(stop - row), s.first + unit, out);
                    continue;
                }
                for (int64_t some = row; some < stop; some += s.few()) {
                    const int count = (int)(stop - some < s.few() ? stop - some : s.few());
                    s.narrow(unit, count, x.row(some), x.stride, out);
                    take(some, count, s.first + unit, out);
                }
            }
        }
    }
}

// take(row, rows, unit, out, band): out[half][2 * r + vector]. Few rows: a thread reads its own parts. Many: units
// times tiles of rows are split evenly over the team, so who computes an output depends on the number of rows.
template <class Take>
INLINE void multiply(const Matrix &m, const char *packed, int parts, Team team, const Operand &x, int64_t from, int64_t to, const Take &take) {
    const int64_t rows = to - from;
    if (rows <= 0) return;
    int few = MAX_TILE, tile = MAX_TILE;
    for (int i = 0; i < m.num_bands; i++) {
        const Product *product = product_of(m.band[i].format);
        few = product->few < few ? product->few : few, tile = product->tile < tile ? product->tile : tile;
    }
    if (rows <= few) {
        for (int part = team.id; part < parts; part += team.count) {
            each_stretch(m, packed, parts, m.first(part, parts), m.first(part + 1, parts), [&](const Stretch &s, const Band &band) __attribute__((always_inline)) {
                vf out[2][2 * MAX_TILE];
                for (int64_t unit = 0; unit < s.count; unit++) {
                    s.narrow(unit, (int)rows, x.row(from), x.stride, out);
                    take(from, (int)rows, s.first + unit, out, band);
                }
                const char *end = s.units + s.count * s.step;
                for (int64_t i = 0; i < AHEAD_BYTES; i += 64) __builtin_prefetch(end + PREFETCH + i, 0, 2);
            });
        }
        return;
    }
    const int64_t tiles = (rows + tile - 1) / tile;
    int64_t item = m.units * tiles * team.id / team.count;
    const int64_t end = m.units * tiles * (team.id + 1) / team.count;
    while (item < end) {
        // the rest of a unit begun by another thread; whole units of a part; the start of a last unit
        int64_t unit = item / tiles, begin = item % tiles, stop = tiles, units = 1;
        if (begin || end - item < tiles) {
            if (end - item < tiles - begin) stop = begin + end - item;
        } else {
            units = (end - item) / tiles;
            const int64_t in_part = m.first(m.part_of(unit, parts) + 1, parts) - unit;
            if (units > in_part) units = in_part;
        }
        each_stretch(m, packed, parts, unit, unit + units, [&](const Stretch &s, const Band &band) __attribute__((always_inline)) {
            multiply_wide(s, x, from, rows, tiles, begin, stop, [&](int64_t row, int count, int64_t which, vf (*out)[2 * MAX_TILE]) __attribute__((always_inline)) {
                take(row, count, which, out, band);
            });
        });
        item += units * (stop - begin);
    }
}

// emit(row, at, n, values): outputs [at, at + n) of a row, n <= 16 (fewer only at a band's end)
template <class Emit>
INLINE void multiply_plain(const Matrix &m, const char *packed, int parts, Team team, const Operand &x, int64_t from, int64_t to, const Emit &emit) {
    multiply(m, packed, parts, team, x, from, to, [&](int64_t row, int rows, int64_t unit, vf (*out)[2 * MAX_TILE], const Band &band) __attribute__((always_inline)) {
        const int64_t within = (unit - band.unit) * UNIT;
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) {
                const int64_t left = band.rows - within - v * LANES;
                if (left > 0) emit(row + r, band.first + within + v * LANES, left < LANES ? left : LANES, out[0][2 * r + v]);
            }
    });
}

// act(gate + bias) * (up + bias), 32 outputs of a row one after the other from the same thread. ``bias``: from
// widen_gated_bias, or null.
template <class Emit>
INLINE void multiply_gated(const Matrix &m, const char *packed, int parts, Team team, const Operand &x, int64_t from, int64_t to, const float *bias,
    int64_t kind, const Emit &emit) {
    const int64_t n = m.outputs;
    multiply(m, packed, parts, team, x, from, to, [&](int64_t row, int rows, int64_t unit, vf (*out)[2 * MAX_TILE], const Band &) __attribute__((always_inline)) {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) {
                const int64_t at = unit * UNIT + v * LANES, left = n - at;
                if (left <= 0) continue;
                vf gate = out[0][2 * r + v], up = out[1][2 * r + v];
                if (bias) gate += load(bias + at), up += load(bias + padded(n) + at);
                emit(row + r, at, left < LANES ? left : LANES, activate(gate, kind) * up);
            }
    });
}

// ---- weight vectors: float32 in the packed form ----

INLINE bool is_vector_or_absent(const hr_tensor &t, int64_t n) { return !t.data || is_vector(t, n); }

// The two halves of a gated bias, each padded to whole vectors.
INLINE void widen_gated_bias(const hr_tensor &t, float *to) {
    hr_tensor half = t;
    half.shape[0] = t.shape[0] / 2;
    widen_vector(half, 0, to);
    half.data = (char *)t.data + half.shape[0] * (t.dtype == HR_BF16 ? 2 : 4);
    widen_vector(half, 0, to + padded(half.shape[0]));
}

// Reserves room for a weight vector of ``t`` when it is there; 0: it is not.
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

INLINE int parts_of(const hr_call *call) {
    return call->threads < 1 ? 1 : call->threads > MAX_PARTS ? MAX_PARTS : call->threads;
}

}  // namespace
