// A convolution over images (batch, channels, height, width) and what follows it element by element.
//
// The image is copied once into padded planes, one for each place that a stride can begin at, so that the
// inputs of neighbouring outputs lie side by side whatever kernel and stride. Outputs are numbered along the
// padded rows: HR_CHANNELS channels by HR_VECTORS vectors of them are summed at a time; those that fall between
// two rows are not stored.
#include "modules/common.cpp"

// @EMITTED

namespace {

constexpr int64_t OUT_H = (IN_H + 2 * PAD_H - DIL_H * (KERNEL_H - 1) - 1) / STRIDE_H + 1;
constexpr int64_t OUT_W = (IN_W + 2 * PAD_W - DIL_W * (KERNEL_W - 1) - 1) / STRIDE_W + 1;
constexpr int64_t PLANE_H = up(IN_H + 2 * PAD_H, STRIDE_H) / STRIDE_H;
constexpr int64_t PLANE_W = up(IN_W + 2 * PAD_W, STRIDE_W) / STRIDE_W;
constexpr int64_t PLANE = PLANE_H * PLANE_W;
constexpr int64_t WIDTH = HR_VECTORS * LANES;
constexpr int64_t FLAT = (OUT_H - 1) * PLANE_W + OUT_W;
constexpr int64_t BLOCKS = (FLAT + WIDTH - 1) / WIDTH;
constexpr int64_t CHANNEL = STRIDE_H * STRIDE_W * PLANE;
constexpr int64_t IMAGE = IN_C * CHANNEL + up(WIDTH + KERNEL_H * DIL_H * PLANE_W + KERNEL_W * DIL_W, LANES);
constexpr int64_t GROUP_IN = IN_C / GROUPS, GROUP_OUT = OUT_C / GROUPS;
constexpr int64_t TAPS = GROUP_IN * KERNEL_H * KERNEL_W;
constexpr int64_t GROUP_BLOCKS = (GROUP_OUT + HR_CHANNELS - 1) / HR_CHANNELS;

struct Packed {
    float weights[GROUPS * GROUP_BLOCKS][TAPS][HR_CHANNELS];
    float scale[GROUPS * GROUP_BLOCKS][HR_CHANNELS], shift[GROUPS * GROUP_BLOCKS][HR_CHANNELS];
    int32_t offsets[TAPS];
};

thread_local Scratch shared, own;

void copy_channel(const T *image, int64_t channel, float *planes) {
    float *target = planes + channel * CHANNEL;
    const T *source = image + channel * IN_H * IN_W;
    memset(target, 0, 4 * CHANNEL);
    for (int64_t y = 0; y < IN_H; y++) {
        const int64_t row = y + PAD_H;
        float *line = target + (row % STRIDE_H) * STRIDE_W * PLANE + (row / STRIDE_H) * PLANE_W;
        if constexpr (STRIDE_W == 1) {
            for (int64_t x = 0; x < IN_W; x++) line[x + PAD_W] = load(source + y * IN_W, x);
        } else {
            for (int64_t x = 0; x < IN_W; x++) {
                const int64_t column = x + PAD_W;
                line[(column % STRIDE_W) * PLANE + column / STRIDE_W] = load(source + y * IN_W, x);
            }
        }
    }
}

void store_tile(const float *tile, int64_t first, int64_t channels, const Packed &packed, int64_t block, T *out) {
    int64_t y = first / PLANE_W, x = first % PLANE_W;
    for (int64_t at = 0; at < WIDTH && y < OUT_H;) {
        const int64_t count = std::min(WIDTH - at, PLANE_W - x), kept = std::min(count, OUT_W - x);
        for (int64_t k = 0; k < channels && kept > 0; k++) {
            const float scale = packed.scale[block][k], shift = packed.shift[block][k];
            const float *from = tile + k * WIDTH + at;
            T *to = out + (k * OUT_H + y) * OUT_W + x;
#pragma omp simd
            for (int64_t j = 0; j < kept; j++) store(to, j, epilogue(from[j] * scale + shift));
        }
        at += count, x = 0, y++;
    }
}

void tile(const Packed &packed, const float *planes, int64_t block, int64_t place, T *image) {
    const int64_t group = block / GROUP_BLOCKS, first_channel = (block % GROUP_BLOCKS) * HR_CHANNELS;
    const float *source = planes + group * GROUP_IN * CHANNEL + place * WIDTH;
    vec sum[HR_CHANNELS][HR_VECTORS];
#pragma GCC unroll 16
    for (int k = 0; k < HR_CHANNELS; k++)
#pragma GCC unroll 8
        for (int v = 0; v < HR_VECTORS; v++) sum[k][v] = vec{};
    for (int64_t t = 0; t < TAPS; t++) {
        const float *from = source + packed.offsets[t], *weight = packed.weights[block][t];
        vec value[HR_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < HR_VECTORS; v++) value[v] = load_vector(from + v * LANES);
#pragma GCC unroll 16
        for (int k = 0; k < HR_CHANNELS; k++)
#pragma GCC unroll 8
            for (int v = 0; v < HR_VECTORS; v++) sum[k][v] += weight[k] * value[v];
    }
    alignas(64) float kept[HR_CHANNELS * WIDTH];
#pragma GCC unroll 16
    for (int k = 0; k < HR_CHANNELS; k++)
#pragma GCC unroll 8
        for (int v = 0; v < HR_VECTORS; v++) *(vec *)(kept + k * WIDTH + v * LANES) = sum[k][v];
    const int64_t channel = group * GROUP_OUT + first_channel;
    store_tile(kept, place * WIDTH, std::min<int64_t>(HR_CHANNELS, GROUP_OUT - first_channel), packed, block,
               image + channel * OUT_H * OUT_W);
}

}  // namespace

extern "C" int64_t hr_packed_bytes(const hr_call *) { return sizeof(Packed); }

extern "C" int hr_pack(const hr_call *call, void *memory) {
    Packed &packed = *(Packed *)memory;
    memset(memory, 0, sizeof(Packed));
    const W *weights = (const W *)call->tensors[S_WEIGHT].data;
    for (int64_t channel = 0; channel < OUT_C; channel++) {
        const int64_t group = channel / GROUP_OUT, inside = channel % GROUP_OUT;
        const int64_t block = group * GROUP_BLOCKS + inside / HR_CHANNELS, k = inside % HR_CHANNELS;
        for (int64_t t = 0; t < TAPS; t++) packed.weights[block][t][k] = load(weights, channel * TAPS + t);
        affine(call, channel, packed.scale[block][k], packed.shift[block][k]);
    }
    int64_t t = 0;
    for (int64_t c = 0; c < GROUP_IN; c++)
        for (int64_t y = 0; y < KERNEL_H; y++)
            for (int64_t x = 0; x < KERNEL_W; x++, t++) {
                const int64_t dy = y * DIL_H, dx = x * DIL_W;
                packed.offsets[t] = (int32_t)(c * CHANNEL +
                                              ((dy % STRIDE_H) * STRIDE_W + dx % STRIDE_W) * PLANE +
                                              (dy / STRIDE_H) * PLANE_W + dx / STRIDE_W);
            }
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    if (!call->packed) return HR_NOT_MINE;
    const Packed &packed = *(const Packed *)call->packed;
    const T *x = (const T *)call->tensors[S_INPUT].data;
    T *out = (T *)call->tensors[S_OUTPUT].data;
    const int threads = HR_THREADS ? std::min<int>(HR_THREADS, call->threads) : call->threads;
    constexpr int64_t all_blocks = GROUPS * GROUP_BLOCKS;
    if (HR_BY_IMAGE) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t n = 0; n < BATCH; n++) {
            float *planes = own.get(IMAGE);
            memset(planes + IN_C * CHANNEL, 0, 4 * (IMAGE - IN_C * CHANNEL));
            for (int64_t c = 0; c < IN_C; c++) copy_channel(x + n * IN_C * IN_H * IN_W, c, planes);
            for (int64_t block = 0; block < all_blocks; block++)
                for (int64_t place = 0; place < BLOCKS; place++)
                    tile(packed, planes, block, place, out + n * OUT_C * OUT_H * OUT_W);
        }
        return HR_DONE;
    }
    float *planes = shared.get(BATCH * IMAGE);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t n = 0; n < BATCH; n++)
            for (int64_t c = 0; c < IN_C; c++) {
                copy_channel(x + n * IN_C * IN_H * IN_W, c, planes + n * IMAGE);
                if (c == 0) memset(planes + n * IMAGE + IN_C * CHANNEL, 0, 4 * (IMAGE - IN_C * CHANNEL));
            }
#pragma omp for schedule(static) collapse(3)
        for (int64_t n = 0; n < BATCH; n++)
            for (int64_t place = 0; place < BLOCKS; place++)
                for (int64_t block = 0; block < all_blocks; block++)
                    tile(packed, planes + n * IMAGE, block, place, out + n * OUT_C * OUT_H * OUT_W);
    }
    return HR_DONE;
}
