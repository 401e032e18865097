// Attention of decode rows, free of the fixed order: what bench invariance compares packs/cpu's own with.
//
// Where packs/cpu joins chunks that end at multiples of 128 keys, turns keys so that a score is one ascending chain, and
// gets the same bits from one thread and from many, here
//
//     a row's keys are cut into parts as equal as can be, and among threads into as many pieces as suit them
//     a score is a dot product along the dimensions, added up across the vector
//     a piece joins its parts as it goes and leaves one partial, whoever computes it
#pragma once
#include "attend.h"

namespace {

struct DecodePiece {
    int64_t row, kv_head, from, to;  // keys
    int64_t group, partial;          // group -1: all keys are this piece's; partial: its number
};

struct DecodeGroup {
    int64_t first, count, left;  // partials; pieces that are not done
};

struct DecodePlan {
    int64_t num_pieces, num_groups, num_partials;
    int threads;
    DecodePiece *pieces;
    DecodeGroup *groups;
    float *partials;
    int64_t *next;

    static int64_t partial_size(const Cache &c) { return c.fan * (c.value_width() + LANES); }
    static int64_t first_key(const Cache &c, int64_t row) { return c.first_key(c.lens[row]); }

    // visit(row, pieces): as many as keep every thread busy to the end, of CHUNK keys at least
    template <class Visit> void each(const Cache &c, const Visit &visit) const {
        int64_t total = 0;
        for (int64_t row = 0; row < c.num_decodes; row++) total += (c.lens[row] - first_key(c, row)) * c.kv_heads;
        const int64_t most = total / (4 * threads) + 1;
        for (int64_t row = 0; row < c.num_decodes; row++) {
            const int64_t keys = c.lens[row] - first_key(c, row), chunks = (keys + CHUNK - 1) / CHUNK;
            int64_t count = threads > 1 ? (keys + most - 1) / most : 1;
            visit(row, count > chunks ? chunks : count);
        }
    }
    void measure(const Cache &c, int num_threads) {
        *this = {};
        threads = num_threads > 0 ? num_threads : 1;
        each(c, [&](int64_t, int64_t count) {
            num_pieces += count * c.kv_heads;
            if (count > 1) num_groups += c.kv_heads, num_partials += count * c.kv_heads;
        });
    }
    void carve(const Cache &c, Carver &carver) {
        pieces = carver.take<DecodePiece>(num_pieces), groups = carver.take<DecodeGroup>(num_groups);
        partials = carver.take<float>(num_partials * partial_size(c)), next = carver.take<int64_t>(1);
    }
    void start(const Cache &c) {
        int64_t piece = 0, group = 0, partial = 0;
        *next = 0;
        each(c, [&](int64_t row, int64_t count) {
            const int64_t from = first_key(c, row), keys = c.lens[row] - from;
            for (int64_t head = 0; head < c.kv_heads; head++) {
                if (count > 1) groups[group] = {partial, count, count};
                for (int64_t i = 0; i < count; i++) {
                    pieces[piece++] = {row, head, from + keys * i / count, from + keys * (i + 1) / count, count > 1 ? group : -1, partial};
                    partial += count > 1;
                }
                group += count > 1;
            }
        });
    }
};

#ifdef __AVX512F__
// Sixteen vectors → the sixteen sums, one a lane.
INLINE vf add_across(const vf *t) {
    __m512 a[8], b[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 x = (__m512)t[i], y = (__m512)t[i + 8];
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    const __m512 even = _mm512_add_ps(_mm512_unpacklo_ps(b[0], b[2]), _mm512_unpackhi_ps(b[0], b[2]));
    const __m512 odd = _mm512_add_ps(_mm512_unpacklo_ps(b[1], b[3]), _mm512_unpackhi_ps(b[1], b[3]));
    const __m512 sums = _mm512_add_ps(_mm512_unpacklo_ps(even, odd), _mm512_unpackhi_ps(even, odd));
    return (vf)_mm512_shuffle_f32x4(sums, sums, 0xd8);
}

// Scores of keys [at, at + 16) for R query vectors.
template <int R>
INLINE void score_keys(const uint32_t *q, int64_t stride, const Addresses &where, const Addresses &next, int at, int64_t dim, float *scores) {
    const int64_t lines = half_lines(dim);
    vf t[R][LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        vf sum[R] = {};
        for (int64_t line = 0; line < lines; line++) {
            fetch(next.keys[at + i] + line * 32);
            const vu key = load_pairs(where.keys[at + i], line * 32, dim);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) add_dot(sum[r], load_line(q + r * stride + line * LANES), key);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) t[r][i] = sum[r];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store(scores + r * CHUNK + at, add_across(t[r]));
}

// What a piece knows so far of R query vectors: sums has value_width floats for each.
struct DecodeState {
    float most[4], total[4];
    float *sums;
};

// ``count`` keys more, at most CHUNK.
template <int R>
__attribute__((noinline)) void attend_part(const Cache &c, const uint32_t *q, const Addresses &where, const Addresses &next, int count, DecodeState &state, float *part) {
    alignas(64) float scores[R * CHUNK];
    const int vectors = (count + 2 * LANES - 1) / (2 * LANES) * 2;
    const int64_t stride = c.key_width() / 2, width = c.value_width();
    for (int i = 0; i < vectors; i++) score_keys<R>(q, stride, where, next, i * LANES, c.head_dim, scores);
    if (c.softcap > 0)
        for (int r = 0; r < R; r++) cap_scores(scores + r * CHUNK, 0, vectors, c.scale, c.softcap);
    const float factor = c.softcap > 0 ? LOG2_E : c.scale * LOG2_E;
    float kept[R];
    for (int r = 0; r < R; r++) {
        float *row = scores + r * CHUNK;
        for (int i = count; i < vectors * LANES; i++) row[i] = -FLT_MAX;
        __m512 best = _mm512_set1_ps(-FLT_MAX), total = _mm512_setzero_ps();
        for (int i = 0; i < vectors; i++) best = _mm512_max_ps(best, _mm512_loadu_ps(row + i * LANES));
        const float here = _mm512_reduce_max_ps(best) * factor, most = here > state.most[r] ? here : state.most[r];
        float share[LANES];
        store(share, power_of_two(all(state.most[r] - most)));
        kept[r] = share[0];
        for (int i = 0; i < vectors; i += 2) {
            const vf low = power_of_two(fma(load(row + i * LANES), all(factor), all(-most)));
            const vf high = power_of_two(fma(load(row + (i + 1) * LANES), all(factor), all(-most)));
            total = _mm512_add_ps(total, _mm512_add_ps((__m512)low, (__m512)high));
            narrow_two(low, high, (uint16_t *)row + i * LANES);
        }
        state.total[r] = state.total[r] * kept[r] + _mm512_reduce_add_ps(total), state.most[r] = most;
    }
    multiply_values(R, (const uint32_t *)scores, CHUNK, where, next, nullptr, 0, vectors * LANES / 2, c.v_head_dim, part, width);
    for (int r = 0; r < R; r++) add_shares(state.sums + r * width, kept[r], part + r * width, 1.0f, width);
}

INLINE void attend_part(int rows, const Cache &c, const uint32_t *q, const Addresses &where, const Addresses &next, int count, DecodeState &state, float *part) {
    switch (rows) {
    case 1: return attend_part<1>(c, q, where, next, count, state, part);
    case 2: return attend_part<2>(c, q, where, next, count, state, part);
    case 3: return attend_part<3>(c, q, where, next, count, state, part);
    case 4: return attend_part<4>(c, q, where, next, count, state, part);
    }
}

struct DecodeWork {
    const Cache &c;
    const DecodePlan &plan;
    const uint16_t *queries;  // as AttendPlan has them

    static int64_t parts(const DecodePiece &p) { return (p.to - p.from + CHUNK - 1) / CHUNK; }
    static int64_t part_start(const DecodePiece &p, int64_t part) { return p.from + (p.to - p.from) * part / parts(p); }

    void find(const DecodePiece &p, int64_t part, Addresses &where) const {
        const int64_t begin = part_start(p, part), count = part_start(p, part + 1) - begin;
        const int64_t *table = c.tables + p.row * c.table_stride;
        const uint16_t *const key = c.keys + p.kv_head * c.key_head, *const value = c.values + p.kv_head * c.value_head;
        int64_t block = begin / c.block_size, within = begin % c.block_size;
        for (int64_t i = 0; i < count; block++, within = 0) {
            const int64_t slot = table[block] * c.block_size + within, stop = i + c.block_size - within < count ? i + c.block_size - within : count;
            const uint16_t *k = key + slot * c.key_slot, *v = value + slot * c.value_slot;
            for (; i < stop; i++, k += c.key_slot, v += c.value_slot) where.keys[i] = k, where.values[i] = v;
        }
        for (int64_t i = count; i < CHUNK; i++) where.keys[i] = where.keys[count - 1], where.values[i] = where.values[count - 1];
    }

    // ``most`` and ``total`` of the row's vectors, then their weighted values
    template <class Emit> INLINE_MEMBER void finish(const DecodePiece &p, float *state, const Emit &emit) const {
        const int64_t width = c.value_width();
        for (int64_t i = 0; i < c.fan; i++) {
            const int64_t head = p.kv_head * c.fan + i;
            float *sums = state + c.fan * LANES + i * width, total = state[c.fan + i], both[2 * LANES], ordered[MAX_HEAD_DIM];
            if (c.sinks) total += exp2f(c.sinks[head] * LOG2_E - state[i]);
            const vf share = all(1.0f / total);
            for (int64_t d = 0; d < width; d += 2 * LANES) {
                store(both, load(sums + d) * share), store(both + LANES, load(sums + d + LANES) * share);
                put_in_order(both, ordered + d);
            }
            emit(p.row, head, (const float *)ordered);
        }
    }
    void join(const DecodeGroup &group, float *state) const {
        const int64_t width = c.value_width(), size = DecodePlan::partial_size(c);
        for (int64_t i = 0; i < c.fan; i++) {
            float most = -FLT_MAX, total = 0;
            for (int64_t k = 0; k < group.count; k++) most = fmaxf(most, plan.partials[(group.first + k) * size + i]);
            float *sums = state + c.fan * LANES + i * width;
            memset(sums, 0, width * 4);
            for (int64_t k = 0; k < group.count; k++) {
                const float *partial = plan.partials + (group.first + k) * size;
                const float share = exp2f(partial[i] - most);
                total += partial[c.fan + i] * share;
                add_shares(sums, 1.0f, partial + c.fan * LANES + i * width, share, width);
            }
            state[i] = most, state[c.fan + i] = total;
        }
    }

    template <class Emit> INLINE_MEMBER void run(const Emit &emit) const {
        auto take = [&] { return __atomic_fetch_add(plan.next, 1, __ATOMIC_RELAXED); };
        int64_t at = take();
        if (at >= plan.num_pieces) return;
        const int64_t width = c.value_width(), size = DecodePlan::partial_size(c);
        thread_local Scratch mine;
        float *memory = (float *)mine.reserve((size + 4 * width) * 4), *part = memory + size;
        Addresses where[2];
        int half = 0;
        find(plan.pieces[at], 0, where[0]);
        where[1] = where[0];
        while (at < plan.num_pieces) {
            const DecodePiece &p = plan.pieces[at];
            float *state = p.group < 0 ? memory : plan.partials + p.partial * size;
            for (int64_t i = 0; i < c.fan; i++) state[i] = -FLT_MAX, state[c.fan + i] = 0;
            memset(state + c.fan * LANES, 0, c.fan * width * 4);
            for (int64_t k = 0; k < parts(p); k++) {
                Addresses &next = where[half ^ 1];
                if (k + 1 < parts(p)) find(p, k + 1, next);
                else if ((at = take()) < plan.num_pieces) find(plan.pieces[at], 0, next);
                const int count = (int)(part_start(p, k + 1) - part_start(p, k));
                for (int64_t from = 0; from < c.fan; from += 4) {
                    const int rows = c.fan - from < 4 ? (int)(c.fan - from) : 4;
                    const uint16_t *q = queries + ((p.kv_head * c.rows + p.row) * c.fan + from) * c.key_width();
                    DecodeState some = {{}, {}, state + c.fan * LANES + from * width};
                    memcpy(some.most, state + from, rows * 4), memcpy(some.total, state + c.fan + from, rows * 4);
                    attend_part(rows, c, (const uint32_t *)q, where[half], next, count, some, part);
                    memcpy(state + from, some.most, rows * 4), memcpy(state + c.fan + from, some.total, rows * 4);
                }
                half ^= 1;
            }
            if (p.group >= 0) {
                DecodeGroup &group = plan.groups[p.group];
                if (__atomic_sub_fetch(&group.left, 1, __ATOMIC_ACQ_REL)) continue;
                join(group, state = memory);
            }
            finish(p, state, emit);
        }
    }
};
#endif

}  // namespace
