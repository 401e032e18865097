// A decoder layer on any step: decodes, chunks, both. Two ways through it, with the same bits for a row:
//
//     few rows    one span: the team shares out the weights, and waits for each other between phases
//     many rows   spans of a tile of rows, each computed by one thread alone from the input to its keys and,
//                 once everybody's keys are in the cache and all rows have attended, to the layer's output
#include "attend.h"
#include "layer_rows.h"

namespace {

constexpr int64_t MANY = 24;               // rows for each thread from which tiles of rows are worth it
constexpr int64_t TILE_BYTES = 512 << 10;  // of what a tile of rows reads and makes, to stay near
constexpr int64_t MIN_TILE_ROWS = 16, MAX_TILE_ROWS = 140;
constexpr int64_t WORTH_A_WAIT = 16384;    // numbers to norm; fewer are normed by every thread for itself

struct Layer {
    LayerRows work;
    Cache cache;
    AttendPlan plan;
    int64_t rows, tile;  // tile 0: few rows
    bool own_operands;
    Room shared;
    float *attended;     // (rows, heads * v_head_dim)
    char *own;           // each thread's part
    int64_t own_bytes;
    int64_t *next;       // tiles that nobody has taken: before attention, after it

    const LayerPack &pack() const { return *work.pack; }

    void carve_own(Carver &carver, Room &room) const {
        if (tile) room.carve(carver, pack(), tile);
        room.carve_operands(carver, pack(), tile ? tile : own_operands ? rows : 0);
    }
    void carve(Carver &carver, int threads) {
        plan.carve(cache, carver);
        attended = carver.take<float>(rows * pack().o.in + LANES);
        next = carver.take<int64_t>(2);
        if (!tile) shared.carve(carver, pack(), rows);
        if (!tile && !own_operands) shared.carve_operands(carver, pack(), rows);
        Carver sizes = {nullptr};
        Room room = {};
        carve_own(sizes, room);
        own_bytes = (int64_t)(sizes.used + 4095) / 4096 * 4096;
        own = carver.take<char>(own_bytes * threads);
    }

    // Heads [begin, end) of a row, q heads then k heads: normed, turned, put where attention finds them.
    void give(float *qkv, int64_t row, int64_t begin, int64_t end) const {
        const LayerPack &p = pack();
        work.turn(qkv, row, begin, end);
        for (int64_t head = begin; head < end; head++) {
            const float *values = qkv + head * p.head_dim;
            const int64_t key = head - p.heads;
            if (key < 0) plan.put_query(cache, row, head, values);
            else write_key(cache, row, key, values, qkv + p.query_width() + p.key_width() + key * p.v_head_dim);
        }
    }
    void attend(Team team) const {
        const int64_t width = pack().o.in, dim = pack().v_head_dim;
        float *to = attended;
        attend_all(cache, plan, team, [=](int64_t row, int64_t head, const float *values) __attribute__((always_inline)) {
            memcpy(to + row * width + head * dim, values, 4 * dim);
        });
    }
    void rest(const Span &s, const Room &room) const {
        const float *from = attended;
        const int64_t width = pack().o.in;
        work.output(s, room, [=](int64_t row) __attribute__((always_inline)) { return from + row * width; });
        work.expand(s, room);
        work.finish(s, room);
    }

    void compute_few(Team team, Room room) const {
        const LayerPack &p = pack();
        const Span s = {0, rows, team, own_operands};
        room.qkv = shared.qkv, room.raw = shared.raw, room.inner = shared.inner;
        if (!own_operands) room.h = shared.h;
        work.project(s, room);
        s.sync();
        const int64_t heads = work.full ? 1 : p.heads + p.kv_heads, items = rows * heads;
        for (int64_t item = items * team.id / team.count; item < items * (team.id + 1) / team.count; item++) {
            float *qkv = room.qkv + item / heads * work.qkv_stride();
            work.norm_projections(qkv);
            if (work.full) give(qkv, item, 0, p.heads + p.kv_heads);
            else give(qkv, item / heads, item % heads, item % heads + 1);
        }
        s.sync();
        attend(team);
        s.sync();
        rest(s, room);
    }

    // Tiles as long as there are any: work(span).
    template <class Work> INLINE_MEMBER void take_tiles(int64_t &taken, const Work &work) const {
        const int64_t tiles = (rows + tile - 1) / tile;
        for (;;) {
            const int64_t at = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            if (at >= tiles) return;
            const int64_t from = rows * at / tiles;
            work(Span{from, rows * (at + 1) / tiles - from, Team{0, 1}, true});
        }
    }
    void compute_many(Team team, const Room &room) const {
        take_tiles(next[0], [&](const Span &s) {
            work.project(s, room);
            for (int64_t row = 0; row < s.count; row++) {
                float *qkv = room.qkv + row * work.qkv_stride();
                work.norm_projections(qkv);
                give(qkv, s.from + row, 0, pack().heads + pack().kv_heads);
            }
        });
        barrier();
        attend(team);
        barrier();
        take_tiles(next[1], [&](const Span &s) { rest(s, room); });
    }

    void compute(Team team) const {
        Carver mine = {own + own_bytes * team.id};
        Room room = {};
        carve_own(mine, room);
        if (tile) compute_many(team, room);
        else compute_few(team, room);
    }
};

// Rows of a tile: few enough for its operands to stay near, and as many tiles for each thread.
int64_t tile_rows(const LayerPack &p, int64_t rows, int threads) {
    const int64_t each = Room::operand_bytes(p, 1) + Operand::row_bytes(operand_of(p.down), p.down.in) + 4 * p.hidden;
    int64_t most = TILE_BYTES / each;
    most = most < MIN_TILE_ROWS ? MIN_TILE_ROWS : most > MAX_TILE_ROWS ? MAX_TILE_ROWS : most;
    const int64_t turns = (rows + most * threads - 1) / (most * threads);
    return (rows + turns * threads - 1) / (turns * threads);
}

bool is_float(const hr_tensor &t, int64_t rows, int64_t width) {
    const int last = t.ndim - 1;
    return t.data && t.dtype == HR_F32 && last >= 1 && t.shape[0] == rows && t.shape[last] == width && t.stride[last] == 1 && (rows == 1 || t.stride[0] == width);
}

// false: not covered
bool read_call(const hr_call *call, Layer &layer) {
    const hr_tensor *t = call->tensors, &x = t[S_x];
    const int64_t *ints = call->ints;
    if (!call->packed || !x.data || x.ndim != 2 || t[S_cos].ndim != 3) return false;
    LayerRows &work = layer.work;
    work.pack = (const LayerPack *)call->packed, work.packed = (const char *)call->packed;
    const LayerPack &p = *work.pack;
    const int64_t rows = layer.rows = x.shape[0], turned = work.rotary_dim = t[S_cos].shape[2];
    if (rows < 1 || turned < 0 || turned % 2 || turned > p.head_dim) return false;
    if (!is_float(x, rows, p.hidden) || !is_float(t[S_out], rows, p.hidden)) return false;
    if (turned && (!is_float(t[S_cos], rows, turned) || !is_float(t[S_sin], rows, turned))) return false;
    work.x = (const float *)x.data, work.out = (float *)t[S_out].data;
    work.cos = (const float *)t[S_cos].data, work.sin = (const float *)t[S_sin].data;
    work.kind = ints[I_activation], work.full = ints[I_qk_norm_full];
    work.eps = (float)call->floats[F_norm_eps], work.qk_eps = (float)call->floats[F_qk_norm_eps];
    Cache &cache = layer.cache;
    const float *sinks = work.vector(p.sinks);
    if (!read_cache(call, S_keys, rows, p.heads, ints[I_block_size], ints[I_num_decodes], ints[I_window], call->floats[F_scale], call->floats[F_softcap], sinks, cache)) return false;
    return cache.kv_heads == p.kv_heads && cache.head_dim == p.head_dim && cache.v_head_dim == p.v_head_dim;
}

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    LayerPack pack;
    return lay_out_layer(call, pack) && pack.head_dim <= MAX_HEAD_DIM && pack.v_head_dim <= MAX_HEAD_DIM ? pack.bytes : 0;
}

extern "C" int hr_pack(const hr_call *call, void *to) {
    LayerPack pack;
    if (!lay_out_layer(call, pack)) return HR_NOT_MINE;
    pack_layer(call, pack, (char *)to);
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    Layer layer = {};
    if (!read_call(call, layer)) return HR_NOT_MINE;
    const int threads = call->threads > 0 ? call->threads : 1;
    layer.tile = layer.rows >= MANY * threads ? tile_rows(layer.pack(), layer.rows, threads) : 0;
    layer.own_operands = layer.rows * layer.pack().hidden <= WORTH_A_WAIT || threads == 1;
    layer.plan.measure(layer.cache, threads);
    Carver sizes = {nullptr};
    layer.carve(sizes, threads);
    Carver carver = {scratch.reserve(sizes.used)};
    if (!carver.memory) return 2;
    layer.carve(carver, threads);
    layer.plan.start(layer.cache);
    layer.next[0] = layer.next[1] = 0;
    run_team(threads, [&](Team team) { layer.compute(team); });
    return HR_DONE;
}
