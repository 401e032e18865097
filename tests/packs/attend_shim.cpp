// The op `attention` on the CPU pack's header: q, k, v and out in float32.
#include "attend.h"

enum { S_q, S_k, S_v, S_keys, S_sinks = S_keys + 7, S_out };
enum { I_block_size, I_num_decodes, I_window };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors, &q = t[S_q], &k = t[S_k], &v = t[S_v];
    const int64_t rows = q.shape[0], heads = q.shape[1], *ints = call->ints;
    Cache cache;
    if (!read_cache(call, S_keys, rows, heads, ints[I_block_size], ints[I_num_decodes], ints[I_window], call->floats[0], call->floats[1], (const float *)t[S_sinks].data, cache)) return HR_NOT_MINE;
    AttendPlan plan;
    plan.measure(cache, call->threads);
    Carver sizes = {nullptr};
    plan.carve(cache, sizes);
    Carver carver = {scratch.reserve(sizes.used)};
    if (!carver.memory) return 2;
    plan.carve(cache, carver);
    plan.start(cache);
    run_team(call->threads, [&](Team team) {
        auto at = [](const hr_tensor &x, int64_t row, int64_t head) { return (const float *)x.data + row * x.stride[0] + head * x.stride[1]; };
        for (int64_t row = rows * team.id / team.count; row < rows * (team.id + 1) / team.count; row++) {
            for (int64_t head = 0; head < cache.kv_heads; head++) write_key(cache, row, head, at(k, row, head), at(v, row, head));
            for (int64_t head = 0; head < heads; head++) plan.put_query(cache, row, head, at(q, row, head));
        }
        barrier();
        attend_all(cache, plan, team, [&](int64_t row, int64_t head, const float *values) {
            memcpy((float *)t[S_out].data + (row * heads + head) * cache.v_head_dim, values, 4 * cache.v_head_dim);
        });
    });
    return HR_DONE;
}
