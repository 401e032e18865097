// softmax(scale q k^T) v for every head: q (heads, QUERIES, WIDTH), k (heads, KEYS, WIDTH), v (heads, KEYS,
// V_WIDTH). A thread takes HR_QUERIES queries of a head: scores, softmax and sums stay in its cache; keys and
// values lie in panels of HR_VECTORS vectors.
#include "modules/common.cpp"

// @EMITTED

namespace {

constexpr int64_t PANEL = HR_VECTORS * LANES;
constexpr int64_t KEYS_UP = up(KEYS, PANEL), V_UP = up(V_WIDTH, PANEL);
constexpr int64_t PARTS = (QUERIES + HR_PART - 1) / HR_PART;

thread_local Scratch own;

void pack_head(const T *k, const T *v, float *keys, float *values) {
    for (int64_t j = 0; j < KEYS_UP; j++) {
        float *to = keys + j / PANEL * PANEL * WIDTH + j % PANEL;
        for (int64_t d = 0; d < WIDTH; d++) to[d * PANEL] = j < KEYS ? load(k, j * WIDTH + d) : 0.0f;
    }
    for (int64_t j = 0; j < KEYS; j++)
        for (int64_t d = 0; d < V_UP; d++)
            values[(d / PANEL * KEYS + j) * PANEL + d % PANEL] = d < V_WIDTH ? load(v, j * V_WIDTH + d) : 0.0f;
}

void queries(const T *q, int64_t first, int64_t count, const float *keys, const float *values, float *memory,
             T *out) {
    float *rows = memory, *scores = rows + HR_QUERIES * WIDTH, *sums = scores + HR_QUERIES * KEYS_UP;
    for (int64_t i = 0; i < count * WIDTH; i++) rows[i] = load(q, first * WIDTH + i);
    const int64_t seen = CAUSAL ? std::min<int64_t>(KEYS, first + count) : KEYS;
    for (int64_t j = 0; j < seen; j += PANEL)
        product_rows<HR_ROWS, HR_VECTORS>(count, rows, WIDTH, keys + j * WIDTH, PANEL, WIDTH, scores + j, KEYS_UP,
                                          (const float *)nullptr);
    float inverse[HR_QUERIES];
    for (int64_t r = 0; r < count; r++) {
        float *row = scores + r * KEYS_UP;
        const int64_t length = CAUSAL ? std::min<int64_t>(KEYS, first + r + 1) : KEYS;
        float most = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < length; j++) most = row[j] > most ? row[j] : most;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < length; j++) {
            const float e = exp_((float)SCALE * (row[j] - most));
            row[j] = e;
            total += e;
        }
        for (int64_t j = length; j < seen; j++) row[j] = 0.0f;
        inverse[r] = 1.0f / total;
    }
    for (int64_t d = 0; d < V_UP; d += PANEL)
        product_rows<HR_ROWS, HR_VECTORS>(count, scores, KEYS_UP, values + d * KEYS, PANEL, seen, sums + d, V_UP,
                                          (const float *)nullptr);
    for (int64_t r = 0; r < count; r++)
#pragma omp simd
        for (int64_t d = 0; d < V_WIDTH; d++)
            store(out, (first + r) * V_WIDTH + d, sums[r * V_UP + d] * inverse[r]);
}

}  // namespace

extern "C" int hr_run(const hr_call *call) {
    const T *q = (const T *)call->tensors[S_QUERY].data, *k = (const T *)call->tensors[S_KEY].data;
    const T *v = (const T *)call->tensors[S_VALUE].data;
    T *out = (T *)call->tensors[S_OUTPUT].data;
    const int threads = HR_THREADS ? std::min<int>(HR_THREADS, call->threads) : call->threads;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2) if (threads > 1)
    for (int64_t head = 0; head < HEADS; head++)
        for (int64_t part = 0; part < PARTS; part++) {
            constexpr int64_t packed = KEYS_UP * WIDTH + KEYS * V_UP;
            float *keys = own.get(packed + HR_QUERIES * (WIDTH + KEYS_UP + V_UP));
            float *values = keys + KEYS_UP * WIDTH;
            pack_head(k + head * KEYS * WIDTH, v + head * KEYS * V_WIDTH, keys, values);
            const int64_t end = std::min<int64_t>(QUERIES, (part + 1) * HR_PART);
            for (int64_t first = part * HR_PART; first < end; first += HR_QUERIES)
                queries(q + head * QUERIES * WIDTH, first, std::min<int64_t>(HR_QUERIES, end - first), keys, values,
                        keys + packed, out + head * QUERIES * V_WIDTH);
        }
    return HR_DONE;
}
