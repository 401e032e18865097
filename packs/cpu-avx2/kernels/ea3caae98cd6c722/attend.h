// Attention of any rows over the paged cache: decode rows, chunks of prefill, both in one call.
//
// A call's work is a list of tasks, taken by whichever thread is free: a run of one sequence's rows, one key
// head, a range of key chunks. A task over all chunks of its rows joins them as it goes; where there are too
// few tasks for the threads, chunks are shared out, each leaves (most, total, weighted values), and the last to
// finish joins them. Chunks end at multiples of CHUNK and are joined in ascending order by the same arithmetic
// in both cases, and keys that a row does not see change nothing in it. So its bits depend on neither the batch
// nor the chunk it comes in nor the threads.
//
//     Cache cache;  read_cache(...)              before the team: what the call holds; false: not covered
//     AttendPlan plan;  plan.measure(cache, threads), plan.carve(carver), plan.start(cache)
//     per row and head, by the team:             write_key(cache, ...), plan.put_query(...)
//     barrier()
//     attend_all(cache, plan, team, emit)        emit(row, head, const float *values): v_head_dim of them, on
//     barrier()                                  some thread of the team; a whole head at a time
#pragma once
#include "attend_tile.h"

namespace {

constexpr int64_t MAX_HEAD_DIM = 256;
constexpr float LOG2_E = 1.44269504f;

// The cache's eight slots and what else of a call attention needs.
struct Cache {
    uint16_t *keys, *values;
    int64_t key_head, key_slot, value_head, value_slot, slots;  // strides in elements
    const int64_t *slot_mapping, *lens, *tables, *chunks, *chunk_tables;
    int64_t table_stride, chunk_stride, chunk_table_stride, num_chunks;
    int64_t rows, num_decodes, block_size, window;
    int64_t heads, kv_heads, fan, head_dim, v_head_dim;
    float scale, softcap;
    const float *sinks;  // (heads,) or null

    int64_t key_width() const { return half_lines(head_dim) * 32; }      // of a query, in bfloat16
    int64_t value_width() const { return half_lines(v_head_dim) * 32; }  // of a weighted sum, in float32
    int64_t first_key(int64_t len) const { return window > 0 && len > window ? len - window : 0; }
};

INLINE bool is_long(const hr_tensor &t, int ndim) { return t.data && t.dtype == HR_I64 && t.ndim == ndim && t.stride[ndim - 1] == 1; }

// Whether the blocks of keys [from, to) lie in the cache.
INLINE bool blocks_fit(const Cache &c, const int64_t *table, int64_t from, int64_t to, int64_t blocks) {
    if (to > blocks * c.block_size) return false;
    const int64_t most = c.slots / c.block_size;
    for (int64_t i = from / c.block_size; i * c.block_size < to; i++)
        if (table[i] < 0 || table[i] >= most) return false;
    return true;
}

// `slot`: the place of the first of the eight. window 0: all keys; softcap 0: none. false: not covered.
INLINE bool read_cache(const hr_call *call, int slot, int64_t rows, int64_t heads, int64_t block_size, int64_t num_decodes, int64_t window, double scale, double softcap, const float *sinks, Cache &c) {
    const hr_tensor *t = call->tensors + slot;
    const hr_tensor &k = t[0], &v = t[1], &mapping = t[2], &tables = t[3], &lens = t[4], &chunks = t[5], &chunk_tables = t[6];
    if (block_size < 1 || rows < 1 || num_decodes < 0 || num_decodes > rows || !(scale > 0)) return false;
    if (!k.data || !v.data || k.dtype != HR_BF16 || v.dtype != HR_BF16 || k.ndim != 3 || v.ndim != 3) return false;
    if (k.stride[2] != 1 || v.stride[2] != 1 || k.shape[0] != v.shape[0] || k.shape[1] != v.shape[1]) return false;
    if (k.shape[2] < 1 || k.shape[2] > MAX_HEAD_DIM || v.shape[2] < 1 || v.shape[2] > MAX_HEAD_DIM) return false;
    if (k.shape[0] < 1 || heads < 1 || heads % k.shape[0]) return false;
    if (!is_long(mapping, 1) || mapping.shape[0] != rows) return false;
    c = {};
    c.keys = (uint16_t *)k.data, c.values = (uint16_t *)v.data;
    c.key_head = k.stride[0], c.key_slot = k.stride[1], c.value_head = v.stride[0], c.value_slot = v.stride[1];
    c.slots = k.shape[1], c.slot_mapping = (const int64_t *)mapping.data;
    c.rows = rows, c.num_decodes = num_decodes, c.block_size = block_size, c.window = window;
    c.kv_heads = k.shape[0], c.heads = heads, c.fan = heads / c.kv_heads;
    c.head_dim = k.shape[2], c.v_head_dim = v.shape[2];
    c.scale = (float)scale, c.softcap = (float)softcap, c.sinks = sinks;
    for (int64_t row = 0; row < rows; row++)
        if (c.slot_mapping[row] < 0 || c.slot_mapping[row] >= c.slots) return false;
    if (num_decodes) {
        if (!is_long(tables, 2) || !is_long(lens, 1) || tables.shape[0] != num_decodes || lens.shape[0] != num_decodes) return false;
        c.tables = (const int64_t *)tables.data, c.table_stride = tables.stride[0], c.lens = (const int64_t *)lens.data;
        for (int64_t row = 0; row < num_decodes; row++)
            if (c.lens[row] < 1 || !blocks_fit(c, c.tables + row * c.table_stride, c.first_key(c.lens[row]), c.lens[row], tables.shape[1])) return false;
    }
    int64_t end = num_decodes;
    if (rows > num_decodes) {
        if (!is_long(chunks, 2) || !is_long(chunk_tables, 2) || chunks.shape[1] != 3 || chunks.shape[0] != chunk_tables.shape[0]) return false;
        c.chunks = (const int64_t *)chunks.data, c.chunk_stride = chunks.stride[0], c.num_chunks = chunks.shape[0];
        c.chunk_tables = (const int64_t *)chunk_tables.data, c.chunk_table_stride = chunk_tables.stride[0];
        for (int64_t i = 0; i < c.num_chunks; i++) {
            const int64_t *chunk = c.chunks + i * c.chunk_stride;
            if (chunk[0] != end || chunk[1] <= end || chunk[1] > rows || chunk[2] < 0) return false;
            if (!blocks_fit(c, c.chunk_tables + i * c.chunk_table_stride, c.first_key(chunk[2] + 1), chunk[2] + chunk[1] - end, chunk_tables.shape[1])) return false;
            end = chunk[1];
        }
    }
    return end == rows;
}

INLINE void write_half(const float *from, int64_t n, uint16_t *to) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vh h = narrow(load(from + i));
        memcpy(to + i, &h, sizeof h);
    }
    for (; i < n; i++) to[i] = narrow1(from[i]);
}

// One head's key, normed and turned, and value of a row into the cache.
INLINE void write_key(const Cache &c, int64_t row, int64_t kv_head, const float *k, const float *v) {
    const int64_t slot = c.slot_mapping[row];
    write_half(k, c.head_dim, c.keys + kv_head * c.key_head + slot * c.key_slot);
    write_half(v, c.v_head_dim, c.values + kv_head * c.value_head + slot * c.value_slot);
}

// ---- who does what ----

constexpr int64_t BATCH = 24;             // query vectors between scores and weighted values
constexpr int64_t BATCH_LANES = 32;       // what is one number a vector lies in whole registers, batch by batch
INLINE int64_t lane_of(int64_t vector) { return vector / BATCH * BATCH_LANES + vector % BATCH; }
INLINE int64_t lanes_of(int64_t vectors) { return (vectors + BATCH - 1) / BATCH * BATCH_LANES; }

// Rows of one sequence on one key head whose chunks are shared out among tasks.
struct AttendGroup {
    int64_t partial;  // where its first chunk's are, in floats
    int64_t from;     // that chunk
    int64_t left;     // tasks that are not done
};

struct AttendTask {
    const int64_t *table;
    int64_t row, rows, len, kv_head;  // len: keys that the first row sees
    int64_t from, to;                 // chunks
    int64_t group;                    // -1: all chunks are this task's
};

struct AttendPlan {
    int64_t num_tasks, num_groups, partial_floats, most_rows, own_bytes;
    int threads;
    uint16_t *queries;  // (kv_heads, rows, fan, key_width), 0 from head_dim on
    AttendTask *tasks;
    AttendGroup *groups;
    float *partials;
    char *own;
    int64_t *next;  // task that nobody has taken

    static constexpr int64_t VECTORS = 768;        // query vectors of a tile, about
    static constexpr int64_t FEW = 64;             // query vectors, up to which chunks may be shared out
    static constexpr int64_t MOST_PARTIALS = 8 << 20;  // floats
    // Query vectors, up to which keys and values are turned as they are read and not kept.
#ifdef __AVX512F__
    static constexpr int64_t DIRECT = 12;
#else
    static constexpr int64_t DIRECT = 0;
#endif
    static constexpr int64_t TURN = 8;             // a chunk's own cost, in query vectors

    // floats that a chunk of a group leaves: most, total, weighted values
    static int64_t partial_size(const Cache &c, int64_t vectors) { return 2 * lanes_of(vectors) + vectors * c.value_width(); }

    // Calls visit(task, pieces) for every run of rows and key head: prefill's last rows, the longest work, first.
    template <class Visit> void each(const Cache &c, const Visit &visit) const {
        const int64_t wanted = 6 * threads, least = c.fan <= FEW / 16 ? 16 : c.fan < FEW ? FEW / c.fan : 1;
        int64_t tile = VECTORS / c.fan;
        tile = tile < least ? least : tile > 256 ? 256 : tile;
        auto tiles = [&](int64_t rows) {
            int64_t count = 0;
            for (int64_t i = 0; i < c.num_chunks; i++) {
                const int64_t *chunk = c.chunks + i * c.chunk_stride;
                count += (chunk[1] - chunk[0] + rows - 1) / rows;
            }
            return count * c.kv_heads;
        };
        while (tile > least && tiles(tile) < wanted) tile = tile / 2 > least ? tile / 2 : least;
        auto range = [&](AttendTask &task) {
            task.from = c.first_key(task.len) / CHUNK;
            task.to = (task.len + task.rows - 1 + CHUNK - 1) / CHUNK;
        };
        for (int64_t i = c.num_chunks - 1; i >= 0; i--) {
            const int64_t *chunk = c.chunks + i * c.chunk_stride;
            for (int64_t at = (chunk[1] - chunk[0] - 1) / tile * tile; at >= 0; at -= tile)
                for (int64_t head = 0; head < c.kv_heads; head++) {
                    AttendTask task = {c.chunk_tables + i * c.chunk_table_stride, chunk[0] + at, tile, chunk[2] + at + 1, head, 0, 0, -1};
                    if (task.row + tile > chunk[1]) task.rows = chunk[1] - task.row;
                    range(task);
                    visit(task);
                }
        }
        for (int64_t row = 0; row < c.num_decodes; row++)
            for (int64_t head = 0; head < c.kv_heads; head++) {
                AttendTask task = {c.tables + row * c.table_stride, row, 1, c.lens[row], head, 0, 0, -1};
                range(task);
                visit(task);
            }
    }
    static int64_t cost(const Cache &c, const AttendTask &task) { return (task.to - task.from) * (task.rows * c.fan + TURN); }

    // Calls visit(task, pieces): tasks whose rows are few are cut where they are long beside all others.
    template <class Visit> void each_cut(const Cache &c, const Visit &visit) const {
        int64_t total = 0;
        each(c, [&](const AttendTask &task) { total += cost(c, task); });
        const int64_t most = total / (4 * threads) + 1;
        each(c, [&](const AttendTask &task) {
            const int64_t vectors = task.rows * c.fan, chunks = task.to - task.from;
            int64_t pieces = 1;
            if (threads > 1 && vectors <= FEW && chunks * partial_size(c, vectors) <= MOST_PARTIALS) pieces = (cost(c, task) + most - 1) / most;
            visit(task, pieces > chunks ? chunks : pieces);
        });
    }

    void measure(const Cache &c, int num_threads) {
        *this = {};
        threads = num_threads > 0 ? num_threads : 1;
        each_cut(c, [&](const AttendTask &task, int64_t pieces) {
            num_tasks += pieces, num_groups += pieces > 1;
            if (pieces > 1) partial_floats += (task.to - task.from) * partial_size(c, task.rows * c.fan);
            most_rows = task.rows > most_rows ? task.rows : most_rows;
        });
    }

    void carve(const Cache &c, Carver &carver);

    // Fills the list; every call of attend_all needs a fresh start.
    void start(const Cache &c) {
        int64_t task_at = 0, group_at = 0, partial_at = 0;
        *next = 0;
        each_cut(c, [&](const AttendTask &whole, int64_t pieces) {
            AttendTask task = whole;
            const int64_t chunks = whole.to - whole.from;
            if (pieces > 1) {
                groups[group_at] = {partial_at, whole.from, pieces};
                partial_at += chunks * partial_size(c, whole.rows * c.fan);
                task.group = group_at++;
            }
            for (int64_t i = 0; i < pieces; i++) {
                task.from = whole.from + chunks * i / pieces, task.to = whole.from + chunks * (i + 1) / pieces;
                tasks[task_at++] = task;
            }
        });
    }

    uint16_t *query(const Cache &c, int64_t row, int64_t head) const {
        return queries + ((head / c.fan * c.rows + row) * c.fan + head % c.fan) * c.key_width();
    }
    // One head of a row, normed and turned.
    INLINE_MEMBER void put_query(const Cache &c, int64_t row, int64_t head, const float *values) const {
        uint16_t *to = query(c, row, head);
        write_half(values, c.head_dim, to);
        memset(to + c.head_dim, 0, 2 * (c.key_width() - c.head_dim));
    }
};

// ---- one task ----

// A thread's own memory.
struct AttendRoom {
    Addresses *where;  // of the chunk at work, of the next, and of what is fetched besides
    uint32_t *keys, *values;
    float *scores, *sums;      // (BATCH, CHUNK), (BATCH, value_width)
    float *most, *total;       // of a chunk, at lane_of each vector of a tile
    Softmax *softmax;          // of all chunks so far, 16 vectors each
    float *joined, *finished;  // weighted values of all chunks so far; one head's, in order

    void carve(const Cache &c, int64_t rows, Carver &carver) {
        const int64_t vectors = rows * c.fan, lanes = lanes_of(vectors), width = c.value_width();
        where = carver.take<Addresses>(3);
        keys = carver.take<uint32_t>(c.key_width() / 2 * CHUNK);
        values = carver.take<uint32_t>((width + PANEL - 1) / PANEL * PANEL * CHUNK_PAIRS);
        scores = carver.take<float>(BATCH * CHUNK), sums = carver.take<float>(BATCH * width);
        most = carver.take<float>(lanes), total = carver.take<float>(lanes);
        softmax = carver.take<Softmax>(lanes / LANES);
        joined = carver.take<float>(vectors * width), finished = carver.take<float>(width);
    }
};

inline void AttendPlan::carve(const Cache &c, Carver &carver) {
    Carver sizes = {nullptr};
    AttendRoom room;
    room.carve(c, most_rows, sizes);
    own_bytes = (int64_t)(sizes.used + 4095) / 4096 * 4096;
    queries = carver.take<uint16_t>(c.rows * c.heads * c.key_width());
    tasks = carver.take<AttendTask>(num_tasks), groups = carver.take<AttendGroup>(num_groups);
    partials = carver.take<float>(partial_floats), next = carver.take<int64_t>(1);
    own = carver.take<char>(own_bytes * threads);
}

struct AttendWork {
    const Cache &c;
    const AttendPlan &plan;
    const AttendTask &task;
    const AttendRoom &room;
    int half = 0;  // of room.where, that has the chunk at work
    const Addresses *beyond = nullptr;  // fetched beside the next chunk's

    int64_t vectors() const { return task.rows * c.fan; }
    int64_t len(int64_t vector) const { return task.len + vector / c.fan; }
    float factor() const { return c.softcap > 0 ? LOG2_E : c.scale * LOG2_E; }

    const Addresses &here() const { return room.where[half]; }
    const Addresses &there() const { return room.where[half ^ 1]; }  // the next chunk's
    bool few() const { return vectors() <= AttendPlan::DIRECT; }

    // Addresses of a chunk's keys and values, as far as the task's rows see them; beside those, of one of them.
    void find(int64_t chunk, Addresses &where) const {
        const int64_t begin = chunk * CHUNK, last = len(vectors() - 1), first = c.first_key(task.len);
        const int64_t from = first > begin ? first - begin : 0, to = last < begin + CHUNK ? last - begin : CHUNK;
        const uint16_t **keys = where.keys, **values = where.values;
        const uint16_t *const key = c.keys + task.kv_head * c.key_head, *const value = c.values + task.kv_head * c.value_head;
        int64_t block = (begin + from) / c.block_size, within = (begin + from) % c.block_size;
        for (int64_t i = from; i < to; block++, within = 0) {
            const int64_t slot = task.table[block] * c.block_size + within, end = i + c.block_size - within < to ? i + c.block_size - within : to;
            const uint16_t *k = key + slot * c.key_slot, *v = value + slot * c.value_slot;
            for (; i < end; i++, k += c.key_slot, v += c.value_slot) keys[i] = k, values[i] = v;
        }
        for (int64_t i = 0; i < from; i++) keys[i] = keys[from], values[i] = values[from];
        for (int64_t i = to; i < CHUNK; i++) keys[i] = keys[to - 1], values[i] = values[to - 1];
    }

    // Vectors of a chunk's keys of which rows that see [from, to) need some: the first (even) and the end.
    static void seen(int64_t begin, int64_t from, int64_t to, int &first, int &end) {
        first = from > begin ? (int)((from - begin) / (2 * LANES) * 2) : 0;
        end = to < begin + CHUNK ? (int)((to - begin + LANES - 1) / LANES) : CHUNK_VECTORS;
    }

    // The next task's first chunk, where this one's last is too short for it to be fetched meanwhile; or null.
    const Addresses *after_a_short_one(int64_t chunk) const {
        if (!few() || chunk + 2 != task.to || len(vectors() - 1) - (chunk + 1) * CHUNK >= CHUNK / 2) return nullptr;
        const int64_t then = __atomic_load_n(plan.next, __ATOMIC_RELAXED);
        if (then >= plan.num_tasks) return nullptr;
        AttendWork{c, plan, plan.tasks[then], room}.find(plan.tasks[then].from, room.where[2]);
        return &room.where[2];
    }

    // Keys turned and values paired, for a task of many vectors, once a chunk.
    void turn_all(int64_t chunk) const {
        const int64_t size = c.key_width() / 2 * PANEL;
        int first, end;
        seen(chunk * CHUNK, c.first_key(task.len), len(vectors() - 1), first, end);
        for (int i = first; i < end; i++) turn_keys(here(), there(), i * LANES, c.head_dim, room.keys + i / PANEL_VECTORS * size + i % PANEL_VECTORS * LANES);
        pair_values(here(), there(), first * LANES / 2, end * LANES / 2, c.v_head_dim, room.values);
    }

    // A batch of vectors on a chunk's keys: room.most and .total, sums (count, value_width). false: they see none
    // of them, and nothing is written.
    bool compute(int64_t chunk, int64_t from, int64_t count, float *sums) const {
        const int64_t begin = chunk * CHUNK, low_len = len(from), high_len = len(from + count - 1);
        if (high_len <= begin || c.first_key(low_len) >= begin + CHUNK) return false;
        int first, end;
        seen(begin, c.first_key(low_len), high_len, first, end);
        const int64_t width = c.key_width() / 2, pairs = (c.head_dim + 1) / 2;
        const uint32_t *q = (const uint32_t *)plan.queries + ((task.kv_head * c.rows + task.row) * c.fan + from) * width;
#ifdef __AVX512F__
        if (few())
            for (int at = first; at < end; at += 2) score_turned(count, q, width, here(), there(), beyond, at * LANES, c.head_dim, room.scores);
        else
#endif
            multiply(count, q, width, room.keys, width * PANEL, first, end, pairs, room.scores, CHUNK);
        const bool whole = low_len >= begin + CHUNK && c.first_key(high_len) <= begin;
        float *most = room.most + lane_of(from), *total = room.total + lane_of(from);
        if (c.softcap > 0)
            for (int64_t i = 0; i < count; i++) cap_scores(room.scores + i * CHUNK, first, end, c.scale, c.softcap);
        for (int64_t i = 0; i < count; i += 4) {
            float *scores = room.scores + i * CHUNK;
            int lows[4] = {}, highs[4] = {};
            for (int64_t j = 0; !whole && j < 4 && i + j < count; j++) {
                const int64_t sees = len(from + i + j), low = c.first_key(sees) - begin, high = sees - begin;
                lows[j] = low < 0 ? 0 : (int)(low < CHUNK ? low : CHUNK), highs[j] = high > CHUNK ? CHUNK : (int)high;
            }
            if (whole) weigh_few<true>(count - i, scores, 0, CHUNK_VECTORS, lows, highs, factor(), most + i, total + i);
            else weigh_few<false>(count - i, scores, first, end, lows, highs, factor(), most + i, total + i);
        }
        const uint32_t *weights = (const uint32_t *)room.scores;
        const int from_pair = first * LANES / 2, end_pair = end * LANES / 2;
#ifdef __AVX512F__
        if (few()) {
            multiply_values(count, weights, CHUNK, here(), there(), beyond, from_pair, end_pair, c.v_head_dim, sums, c.value_width());
            return true;
        }
#endif
        multiply(count, weights + from_pair, CHUNK, room.values + from_pair * PANEL, CHUNK_PAIRS * PANEL, 0, (int)(c.value_width() / LANES), end_pair - from_pair, sums, c.value_width());
        return true;
    }

    void forget() const {
        for (int64_t i = 0; i * LANES < lanes_of(vectors()); i++) room.softmax[i] = {all(-FLT_MAX), vf{}};
        memset(room.joined, 0, vectors() * c.value_width() * sizeof(float));
    }

    // A batch's (most, total, sums) of a chunk to what is joined.
    void join(int64_t from, int64_t count, const float *most, const float *total, const float *sums) const {
        const int64_t width = c.value_width();
        for (int64_t at = 0; at < count; at += LANES) {
            vf was, comes;
            float shares[2][LANES];
            room.softmax[(lane_of(from) + at) / LANES].join(load(most + at), load(total + at), was, comes);
            store(shares[0], was), store(shares[1], comes);
            for (int64_t i = 0; i < LANES && at + i < count; i++) {
                float *to = room.joined + (from + at + i) * width;
                const float *add = sums + (at + i) * width;
                add_shares(to, shares[0][i], add, shares[1][i], width);
            }
        }
    }

    template <class Emit> INLINE_MEMBER void finish(int64_t from, int64_t count, const Emit &emit) const {
        const int64_t width = c.value_width();
        for (int64_t at = 0; at < count; at += LANES) {
            Softmax &s = room.softmax[(lane_of(from) + at) / LANES];
            vf was = all(1.0f), comes;
            float shares[LANES], both[2 * LANES];
            if (c.sinks) {
                for (int64_t i = 0; i < LANES; i++) shares[i] = c.sinks[task.kv_head * c.fan + (from + at + i) % c.fan] * LOG2_E;
                s.join(load(shares), all(1.0f), was, comes);
            }
            store(shares, was / s.total);
            for (int64_t i = 0; i < LANES && at + i < count; i++) {
                const int64_t vector = from + at + i;
                const float *joined = room.joined + vector * width;
                for (int64_t d = 0; d < width; d += 2 * LANES) {
                    store(both, load(joined + d) * shares[i]), store(both + LANES, load(joined + d + LANES) * shares[i]);
                    put_in_order(both, room.finished + d);
                }
                emit(task.row + vector / c.fan, task.kv_head * c.fan + vector % c.fan, (const float *)room.finished);
            }
        }
    }

    // visit(from, count) for each batch
    template <class Visit> INLINE_MEMBER void batches(const Visit &visit) const {
        for (int64_t from = 0; from < vectors(); from += BATCH) visit(from, vectors() - from < BATCH ? vectors() - from : BATCH);
    }

    // prepare(addresses): the next task's first chunk's, if there is a next task
    template <class Prepare, class Emit> INLINE_MEMBER void run(const Prepare &prepare, const Emit &emit) {
        const int64_t width = c.value_width(), lanes = lanes_of(vectors()), size = AttendPlan::partial_size(c, vectors());
        AttendGroup *group = task.group < 0 ? nullptr : plan.groups + task.group;
        float *partials = group ? plan.partials + group->partial : nullptr;
        if (!group) forget();
        for (int64_t i = 0; i < lanes; i++) room.most[i] = -FLT_MAX, room.total[i] = 0;
        for (int64_t chunk = task.from; chunk < task.to; chunk++) {
            if (chunk + 1 < task.to) find(chunk + 1, room.where[half ^ 1]);
            else prepare(room.where[half ^ 1]);
            beyond = after_a_short_one(chunk);
            if (!few()) turn_all(chunk);
            float *partial = group ? partials + (chunk - group->from) * size : nullptr;
            batches([&](int64_t from, int64_t count) __attribute__((always_inline)) {
                float *sums = group ? partial + 2 * lanes + from * width : room.sums, *most = room.most + lane_of(from), *total = room.total + lane_of(from);
                if (compute(chunk, from, count, sums)) {
                    if (!group) join(from, count, most, total, sums);
                } else if (group) {
                    for (int64_t i = 0; i < count; i++) most[i] = -FLT_MAX, total[i] = 0;
                    memset(sums, 0, count * width * sizeof(float));
                }
            });
            half ^= 1;
            if (group) memcpy(partial, room.most, lanes * 4), memcpy(partial + lanes, room.total, lanes * 4);
        }
        if (group) {
            if (__atomic_sub_fetch(&group->left, 1, __ATOMIC_ACQ_REL)) return;
            forget();
            const int64_t chunks = (task.len + task.rows - 1 + CHUNK - 1) / CHUNK - group->from;
            for (int64_t i = 0; i < chunks; i++) {
                const float *partial = partials + i * size;
                batches([&](int64_t from, int64_t count) {
                    join(from, count, partial + lane_of(from), partial + lanes + lane_of(from), partial + 2 * lanes + from * width);
                });
            }
        }
        batches([&](int64_t from, int64_t count) __attribute__((always_inline)) { finish(from, count, emit); });
    }
};

// Every row that is a query sees the keys in the cache, its own among them: a barrier must lie between.
template <class Emit> INLINE void attend_all(const Cache &c, const AttendPlan &plan, Team team, const Emit &emit) {
    Carver carver = {plan.own + plan.own_bytes * team.id};
    AttendRoom room;
    room.carve(c, plan.most_rows, carver);
    auto take = [&] { return __atomic_fetch_add(plan.next, 1, __ATOMIC_RELAXED); };
    int64_t at = take();
    if (at >= plan.num_tasks) return;
    int half = 0;
    AttendWork{c, plan, plan.tasks[at], room}.find(plan.tasks[at].from, room.where[half]);
    room.where[1] = room.where[0];
    while (at < plan.num_tasks) {
        AttendWork work = {c, plan, plan.tasks[at], room, half};
        work.run([&](Addresses &first) {
            at = take();
            if (at < plan.num_tasks) AttendWork{c, plan, plan.tasks[at], room}.find(plan.tasks[at].from, first);
        }, emit);
        half = work.half;
    }
}

}  // namespace
