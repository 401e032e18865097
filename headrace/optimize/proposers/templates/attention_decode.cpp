#include "vectors.cpp"
// Attention of decode rows over the paged cache, in float32 on keys and values of bfloat16.
//
// Work comes in items of one row, one key head and at most HR_CHUNK keys, cut at multiples of HR_CHUNK; each
// leaves (largest score, sum, weighted values) of its fan of query heads, and ``combine`` joins them in order.
// So nothing depends on the batch or on the number of threads.

#ifndef HR_CHUNK
#define HR_CHUNK 128
#endif
#ifndef HR_HEAD_DIM
#define HR_HEAD_DIM 64
#endif
#ifndef HR_V_HEAD_DIM
#define HR_V_HEAD_DIM 64
#endif
#ifndef HR_FAN
#define HR_FAN 3  // query heads per key head
#endif

namespace {

constexpr int K_VECTORS = (HR_HEAD_DIM + LANES - 1) / LANES, K_TAIL = HR_HEAD_DIM - (K_VECTORS - 1) * LANES;
constexpr int V_VECTORS = (HR_V_HEAD_DIM + LANES - 1) / LANES, V_TAIL = HR_V_HEAD_DIM - (V_VECTORS - 1) * LANES;
constexpr int K_WIDTH = K_VECTORS * LANES, V_WIDTH = V_VECTORS * LANES;
constexpr int PARTIAL = HR_FAN * (V_WIDTH + 2);  // floats an item leaves

struct Cache {
    uint16_t *keys, *values;
    int64_t key_head, key_slot, value_head, value_slot, slots;
    const int64_t *slot_mapping, *lens, *tables;
    int64_t table_stride, block_size, window, rows, kv_heads;
    float scale, softcap;
    const float *sinks;

    int64_t first_key(int64_t row) const { return window > 0 && lens[row] > window ? lens[row] - window : 0; }
    int64_t first_chunk(int64_t row) const { return first_key(row) / HR_CHUNK; }
    int64_t chunks(int64_t row) const { return (lens[row] + HR_CHUNK - 1) / HR_CHUNK - first_chunk(row); }
    int64_t items() const {
        int64_t total = 0;
        for (int64_t row = 0; row < rows; row++) total += chunks(row) * kv_heads;
        return total;
    }
};

INLINE bool is_long(const hr_tensor &t, int ndim) { return t.data && t.dtype == HR_I64 && t.ndim == ndim && t.stride[ndim - 1] == 1; }

// The cache of a call of decodes alone; false: not such a call.
INLINE bool read_cache(const hr_call *call, int keys, int values, int slot_mapping, int tables, int lens, int64_t rows, int64_t block_size, int64_t num_decodes, Cache &cache) {
    const hr_tensor *t = call->tensors;
    const hr_tensor &k = t[keys], &v = t[values], &table = t[tables];
    if (num_decodes != rows || block_size < 1) return false;
    if (!k.data || !v.data || k.dtype != HR_BF16 || v.dtype != HR_BF16 || k.ndim != 3 || v.ndim != 3) return false;
    if (k.shape[2] != HR_HEAD_DIM || v.shape[2] != HR_V_HEAD_DIM || k.stride[2] != 1 || v.stride[2] != 1) return false;
    if (k.shape[0] != v.shape[0] || k.shape[1] != v.shape[1]) return false;
    if (!is_long(t[slot_mapping], 1) || !is_long(t[lens], 1) || !is_long(table, 2)) return false;
    if (t[slot_mapping].shape[0] != rows || t[lens].shape[0] != rows || table.shape[0] != rows) return false;
    cache.keys = (uint16_t *)k.data, cache.values = (uint16_t *)v.data;
    cache.key_head = k.stride[0], cache.key_slot = k.stride[1];
    cache.value_head = v.stride[0], cache.value_slot = v.stride[1], cache.slots = k.shape[1];
    cache.slot_mapping = (const int64_t *)t[slot_mapping].data, cache.lens = (const int64_t *)t[lens].data;
    cache.tables = (const int64_t *)table.data, cache.table_stride = table.stride[0];
    cache.block_size = block_size, cache.rows = rows, cache.kv_heads = k.shape[0];
    for (int64_t row = 0; row < rows; row++) {
        int64_t slot = cache.slot_mapping[row], len = cache.lens[row];
        if (slot < 0 || slot >= cache.slots || len < 1 || len > table.shape[1] * block_size) return false;
        const int64_t *blocks = cache.tables + row * cache.table_stride;
        for (int64_t i = 0; i < (len + block_size - 1) / block_size; i++)
            if (blocks[i] < 0 || (blocks[i] + 1) * block_size > cache.slots) return false;
    }
    return true;
}

INLINE void write_key(const Cache &c, int64_t row, int64_t head, const float *k, const float *v) {
    Rows{(char *)(c.keys + head * c.key_head + c.slot_mapping[row] * c.key_slot), 0, true}.write(0, 0, HR_HEAD_DIM, k);
    Rows{(char *)(c.values + head * c.value_head + c.slot_mapping[row] * c.value_slot), 0, true}.write(0, 0, HR_V_HEAD_DIM, v);
}

// Scores of N query heads against 16 keys.
template <int N> INLINE void scores16(const uint16_t *const *keys, const float (*q)[K_WIDTH], float (*scores)[HR_CHUNK]) {
    constexpr int TOGETHER = N >= 4 ? 2 : 4;
    vf sums[N][LANES];
    for (int key = 0; key < LANES; key += TOGETHER) {
        vf acc[TOGETHER][N] = {};
#pragma GCC unroll 4
        for (int d = 0; d < K_VECTORS - 1; d++)
#pragma GCC unroll 4
            for (int j = 0; j < TOGETHER; j++) {
                vf k = load_half(keys[key + j] + d * LANES);
#pragma GCC unroll 4
                for (int f = 0; f < N; f++) acc[j][f] = fma(k, load(q[f] + d * LANES), acc[j][f]);
            }
#pragma GCC unroll 4
        for (int j = 0; j < TOGETHER; j++) {
            vf k = load_half_part<K_TAIL>(keys[key + j] + (K_VECTORS - 1) * LANES);
#pragma GCC unroll 4
            for (int f = 0; f < N; f++) sums[f][key + j] = fma(k, load(q[f] + (K_VECTORS - 1) * LANES), acc[j][f]);
        }
    }
#pragma GCC unroll 4
    for (int f = 0; f < N; f++) store(scores[f], sums16(sums[f]));
}

// Values of V vectors from dimension vector ``from`` on, weighted for N query heads.
template <int N, int V, bool TAIL>
INLINE void weigh(const uint16_t *const *values, int64_t count, int from, const float (*weights)[HR_CHUNK], float *out) {
    vf acc[N][V] = {};
    for (int64_t key = 0; key < count; key++) {
#pragma GCC unroll 4
        for (int d = 0; d < V; d++) {
            const uint16_t *at = values[key] + (from + d) * LANES;
            vf v = TAIL && d == V - 1 ? load_half_part<V_TAIL>(at) : load_half(at);
#pragma GCC unroll 4
            for (int f = 0; f < N; f++) acc[f][d] = fma(v, all(weights[f][key]), acc[f][d]);
        }
    }
#pragma GCC unroll 4
    for (int f = 0; f < N; f++)
#pragma GCC unroll 4
        for (int d = 0; d < V; d++) store(out + f * V_WIDTH + (from + d) * LANES, acc[f][d]);
}

template <int N> INLINE void attend_heads(const Cache &c, const uint16_t *const *keys, const uint16_t *const *values, int64_t count, const float (*q)[K_WIDTH], float *largest_out, float *sum_out, float *out) {
    alignas(64) float scores[N][HR_CHUNK];
    for (int64_t key = 0; key < count; key += LANES) scores16<N>(keys + key, q, (float (*)[HR_CHUNK])(scores[0] + key));
    for (int f = 0; f < N; f++) {
        for (int64_t key = count; key < (count + LANES - 1) / LANES * LANES; key++) scores[f][key] = -FLT_MAX;
        vf best = all(-FLT_MAX), total = {};
        for (int64_t key = 0; key < count; key += LANES) {
            vf s = load(scores[f] + key);
            if (c.softcap > 0) s = c.softcap * hyperbolic_tangent(s / c.softcap);
            store(scores[f] + key, s);
            if (key + LANES > count)
                for (int64_t i = count; i < key + LANES; i++) scores[f][i] = -FLT_MAX;
            best = larger(load(scores[f] + key), best);
        }
        float most = largest(best);
        for (int64_t key = 0; key < count; key += LANES) {
            store(scores[f] + key, exponential(load(scores[f] + key) - most));
            if (key + LANES > count)
                for (int64_t i = count; i < key + LANES; i++) scores[f][i] = 0;
            total += load(scores[f] + key);
        }
        largest_out[f] = most, sum_out[f] = sum(total);
    }
    constexpr int TILE = 4, WHOLE = (V_VECTORS - 1) / TILE * TILE;
    for (int from = 0; from < WHOLE; from += TILE) weigh<N, TILE, false>(values, count, from, scores, out);
    weigh<N, V_VECTORS - WHOLE, true>(values, count, WHOLE, scores, out);
}

// One item: q (HR_FAN, K_WIDTH) scaled, 0 beyond head_dim.
INLINE void attend(const Cache &c, int64_t row, int64_t head, int64_t chunk, const float (*q)[K_WIDTH], float *partial) {
    int64_t begin = chunk * HR_CHUNK, end = begin + HR_CHUNK;
    if (begin < c.first_key(row)) begin = c.first_key(row);
    if (end > c.lens[row]) end = c.lens[row];
    const int64_t count = end - begin, *blocks = c.tables + row * c.table_stride;
    const uint16_t *keys[HR_CHUNK + LANES], *values[HR_CHUNK + LANES];
    int64_t block = begin / c.block_size, within = begin % c.block_size;
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = blocks[block] * c.block_size + within;
        keys[i] = c.keys + head * c.key_head + slot * c.key_slot;
        values[i] = c.values + head * c.value_head + slot * c.value_slot;
        if (++within == c.block_size) within = 0, block++;
    }
    for (int64_t i = count; i < (count + LANES - 1) / LANES * LANES; i++) keys[i] = keys[count - 1];
    float *most = partial, *total = partial + HR_FAN, *out = partial + 2 * HR_FAN;
    int f = 0;
    for (; f + 4 <= HR_FAN; f += 4) attend_heads<4>(c, keys, values, count, q + f, most + f, total + f, out + f * V_WIDTH);
    constexpr int REST = HR_FAN % 4;
    if constexpr (REST > 0) attend_heads<REST>(c, keys, values, count, q + f, most + f, total + f, out + f * V_WIDTH);
}

// Calls visit(row, head, chunk, item) for the items that are this thread's: about as many keys for each.
template <class Visit> INLINE void share_items(const Cache &c, Team team, const Visit &visit) {
    constexpr int64_t FIXED = 24;  // an item's own cost, in keys
    int64_t total = 0, before = 0, item = 0;
    auto cost = [&](int64_t row, int64_t chunk) {
        int64_t begin = chunk * HR_CHUNK, end = begin + HR_CHUNK;
        if (begin < c.first_key(row)) begin = c.first_key(row);
        return (end > c.lens[row] ? c.lens[row] : end) - begin + FIXED;
    };
    for (int64_t row = 0; row < c.rows; row++)
        for (int64_t i = 0; i < c.chunks(row); i++) total += c.kv_heads * cost(row, c.first_chunk(row) + i);
    for (int64_t row = 0; row < c.rows; row++)
        for (int64_t head = 0; head < c.kv_heads; head++)
            for (int64_t i = 0; i < c.chunks(row); i++, item++) {
                int64_t chunk = c.first_chunk(row) + i, here = cost(row, chunk);
                int64_t owner = (2 * before + here) * team.count / (2 * total);
                before += here;
                if (owner == team.id) visit(row, head, chunk, item);
            }
}

// One row's items, in order, to its heads' outputs (kv_heads * HR_FAN * v_head_dim).
INLINE void combine(const Cache &c, int64_t row, const float *partials, float *out) {
    int64_t first = 0;
    for (int64_t before = 0; before < row; before++) first += c.chunks(before) * c.kv_heads;
    const int64_t chunks = c.chunks(row);
    for (int64_t head = 0; head < c.kv_heads; head++)
        for (int f = 0; f < HR_FAN; f++) {
            const float *parts = partials + (first + head * chunks) * PARTIAL;
            float most = c.sinks ? c.sinks[head * HR_FAN + f] : -FLT_MAX, total = 0;
            for (int64_t i = 0; i < chunks; i++) {
                float here = parts[i * PARTIAL + f];
                most = here > most ? here : most;
            }
            if (c.sinks) total = expf(c.sinks[head * HR_FAN + f] - most);
            vf acc[V_VECTORS] = {};
            for (int64_t i = 0; i < chunks; i++) {
                const float *part = parts + i * PARTIAL;
                float share = part[f] == most ? 1.0f : expf(part[f] - most);
                total += share * part[HR_FAN + f];
                for (int d = 0; d < V_VECTORS; d++) acc[d] = fma(load(part + 2 * HR_FAN + f * V_WIDTH + d * LANES), all(share), acc[d]);
            }
            float *to = out + (head * HR_FAN + f) * HR_V_HEAD_DIM;
            for (int d = 0; d < V_VECTORS - 1; d++) store(to + d * LANES, acc[d] / total);
            float tail[LANES];
            store(tail, acc[V_VECTORS - 1] / total);
            memcpy(to + (V_VECTORS - 1) * LANES, tail, 4 * V_TAIL);
        }
}

// Rotates the first ``dim`` features in place; cos and sin as ops.rope takes them (sin signed).
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

}  // namespace
