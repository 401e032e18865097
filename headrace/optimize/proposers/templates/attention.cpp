#include "attention_decode.cpp"
// Attention alone, on decode rows whose queries and keys are normed and turned already: one barrier.

#ifndef HR_MAX_ROWS
#define HR_MAX_ROWS 8
#endif

namespace {

// (rows, heads, dim) with heads side by side or apart
INLINE bool is_heads(const hr_tensor &t, int64_t rows, int64_t heads, int64_t dim) {
    return is_rows(t) && t.ndim == 3 && t.shape[0] == rows && t.shape[1] == heads && t.shape[2] == dim;
}
INLINE Rows head_of(const hr_tensor &t, int64_t head) {
    const bool half = t.dtype == HR_BF16;
    return {(char *)t.data + head * t.stride[1] * (half ? 2 : 4), t.stride[0], half};
}

}  // namespace

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    const hr_tensor &q = t[S_q], &k = t[S_k], &v = t[S_v], &to = t[S_out], &sinks = t[S_sinks];
    const int64_t rows = q.shape[0], kv_heads = call->ints[I_num_kv_heads], heads = kv_heads * HR_FAN;
    if (rows < 1 || rows > HR_MAX_ROWS || kv_heads < 1) return HR_NOT_MINE;
    if (!is_heads(q, rows, heads, HR_HEAD_DIM) || !is_heads(k, rows, kv_heads, HR_HEAD_DIM) || !is_heads(v, rows, kv_heads, HR_V_HEAD_DIM)) return HR_NOT_MINE;
    if (!is_rows(to) || to.ndim != 2 || to.shape[0] != rows || to.shape[1] != heads * HR_V_HEAD_DIM) return HR_NOT_MINE;
    if (sinks.data && !is_vector(sinks, heads)) return HR_NOT_MINE;
    Cache cache = {};
    if (!read_cache(call, S_keys, S_values, S_slot_mapping, S_block_tables, S_lens, rows, call->ints[I_block_size], call->ints[I_num_decodes], cache)) return HR_NOT_MINE;
    if (cache.kv_heads != kv_heads) return HR_NOT_MINE;
    cache.window = call->ints[I_window], cache.scale = (float)call->floats[F_scale], cache.softcap = (float)call->floats[F_softcap];
    const int threads = call->threads > 0 ? call->threads : 1;
    const size_t width = padded(heads * HR_V_HEAD_DIM) + LANES;
    const size_t partial_bytes = (cache.items() * PARTIAL * 4 + 63) / 64 * 64, sink_bytes = padded(heads) * 4 + 64;
    char *memory = scratch.reserve(partial_bytes + sink_bytes + width * 4 * threads);
    if (!memory) return 2;
    float *partials = (float *)memory;
    if (sinks.data) {
        float *wide = (float *)(memory + partial_bytes);
        widen_vector(sinks, 0, wide);
        cache.sinks = wide;
    }
    const Rows out = rows_of(to);
    run_team(threads, [&](Team team) {
        alignas(64) float query[HR_FAN][K_WIDTH], key[K_WIDTH], value[V_WIDTH];
        memset(query, 0, sizeof query);
        share_items(cache, team, [&](int64_t row, int64_t head, int64_t chunk, int64_t item) {
            for (int f = 0; f < HR_FAN; f++) {
                head_of(q, head * HR_FAN + f).read(row, 0, HR_HEAD_DIM, query[f]);
                for (int i = 0; i < HR_HEAD_DIM; i++) query[f][i] *= cache.scale;
            }
            if ((chunk + 1) * HR_CHUNK >= cache.lens[row]) {
                head_of(k, head).read(row, 0, HR_HEAD_DIM, key), head_of(v, head).read(row, 0, HR_V_HEAD_DIM, value);
                write_key(cache, row, head, key, value);
            }
            attend(cache, row, head, chunk, query, partials + item * PARTIAL);
        });
        barrier();
        float *room = (float *)(memory + partial_bytes + sink_bytes) + width * team.id;
        for (int64_t row = team.id; row < rows; row += team.count) {
            combine(cache, row, partials, room);
            out.write(row, 0, heads * HR_V_HEAD_DIM, room);
        }
    });
    return HR_DONE;
}
