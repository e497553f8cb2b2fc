// Products and attention of few rows, which are bound by the bytes of the weights and keys that they read: each is read
// once, in order, and prefetched. Plain C++ with vector types, compiled by native.py; weights and keys are float32 or
// bfloat16, sums are float32. A row's result has the same bits among any number of rows, and with any number of threads:
// compiled without contraction, since compilers fuse multiplications and additions in one variant and not in another.
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

extern "C" int omp_get_thread_num(void);   // from the OpenMP library that torch has loaded

namespace {

constexpr int64_t LANES = 16, MOST_ROWS = 8, AHEAD_BYTES = 4096, LINE_BYTES = 64;
typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
struct BFloat16 { uint16_t bits; };

template <typename To, typename From> inline To cast(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    memcpy(&to, &from, sizeof to);
    return to;
}

inline Vec load(const float *at) { return *(const Vec *)at; }
inline Vec load(const BFloat16 *at) { return cast<Vec>(__builtin_convertvector(*(const Shorts *)at, Words) << 16); }

inline Vec fused(Vec a, Vec b, Vec c) {  // a * b + c, where there is such an instruction
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}
inline Vec all(float x) { return Vec{} + x; }

inline void store(float *at, float x) { *at = x; }
inline void store(BFloat16 *at, float x) {  // the nearest, ties to even
    const uint32_t bits = cast<uint32_t>(x);
    at->bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline float sum_of(Vec v) {
    Half halves[2];
    memcpy(halves, &v, sizeof v);
    const Half half = halves[0] + halves[1];
    Quarter quarters[2];
    memcpy(quarters, &half, sizeof half);
    const Quarter q = quarters[0] + quarters[1];
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// exp of numbers that are not above 0, to about 2 units in the last place; NaN stays.
inline Vec exp_of(Vec given) {
    const Vec lowest = all(-87);
    const Vec x = given < lowest ? lowest : given;
    const Vec shifted = fused(x, all(1.44269504088896341f), all(12582912));  // its last bits are the power of 2
    const Vec power = shifted - 12582912.0f;
    const Vec r = fused(power, all(-1.428606765330187e-06f), fused(power, all(-0.693145751953125f), x));
    Vec p = fused(r, all(1.9875691500e-4f), all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r + 1.0f);
    const Vec found = cast<Vec>(cast<Ints>(p) + ((cast<Ints>(shifted) - 0x4B400000) << 23));
    return given == given ? found : given;
}

// sums[r] += elementwise products of LINE_BYTES of `weight` and of `rows` rows of `x`, `inputs` apart.
template <int rows>
inline __attribute__((always_inline)) void multiply(const float *x, const float *weight, Vec *sums, int64_t inputs) {
    const Vec w = load(weight);
    for (int r = 0; r < rows; r++) sums[r] = fused(load(x + r * inputs), w, sums[r]);
}
template <int rows>
inline __attribute__((always_inline)) void multiply(const BFloat16 *x, const BFloat16 *weight, Vec *sums,
                                                    int64_t inputs) {
#ifdef __AVX512BF16__
    const __m512bh w = cast<__m512bh>(_mm512_loadu_si512(weight));
    for (int r = 0; r < rows; r++)
        sums[r] = (Vec)_mm512_dpbf16_ps((__m512)sums[r], cast<__m512bh>(_mm512_loadu_si512(x + r * inputs)), w);
#else
    const Vec low = load(weight), high = load(weight + LANES);
    for (int r = 0; r < rows; r++) {
        sums[r] = fused(load(x + r * inputs), low, sums[r]);
        sums[r] = fused(load(x + r * inputs + LANES), high, sums[r]);
    }
#endif
}

// `rows` rows of `x` times one row of a weight.
template <int rows, typename T>
inline __attribute__((always_inline)) void product(const T *x, const T *weight, T *out, int64_t inputs,
                                                   int64_t outputs) {
    Vec sums[rows] = {};
    for (int64_t k = 0; k < inputs; k += LINE_BYTES / sizeof(T)) {
        __builtin_prefetch((const char *)(weight + k) + AHEAD_BYTES);
        multiply<rows>(x + k, weight + k, sums, inputs);
    }
    for (int r = 0; r < rows; r++) store(out + r * outputs, sum_of(sums[r]));
}

// Rows [starts[g], starts[g] + heights[g]) of `x` times the transposed weight of experts[g].
template <typename T>
void grouped_linear(const T *x, const T *weights, T *out, const int64_t *experts, const int64_t *starts,
                    const int64_t *heights, int64_t groups, int64_t inputs, int64_t outputs, int threads) {
    // A thread that is held up leaves its share to the others.
    const int64_t parts = threads > 1 ? (groups > 2 * threads ? 2 : 4 * threads) : 1;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < groups * parts; item++) {
        const int64_t g = item / parts, part = item % parts;
        const int64_t first = outputs * part / parts, last = outputs * (part + 1) / parts;
        for (int64_t o = first; o < last; o++) {
            const T *weight = weights + (experts[g] * outputs + o) * inputs;
            for (int64_t r = 0; r < heights[g]; r += MOST_ROWS) {
                const T *row = x + (starts[g] + r) * inputs;
                T *to = out + (starts[g] + r) * outputs + o;
                switch (heights[g] - r) {
                    case 1: product<1>(row, weight, to, inputs, outputs); break;
                    case 2: product<2>(row, weight, to, inputs, outputs); break;
                    case 3: product<3>(row, weight, to, inputs, outputs); break;
                    case 4: product<4>(row, weight, to, inputs, outputs); break;
                    case 5: product<5>(row, weight, to, inputs, outputs); break;
                    case 6: product<6>(row, weight, to, inputs, outputs); break;
                    case 7: product<7>(row, weight, to, inputs, outputs); break;
                    default: product<MOST_ROWS>(row, weight, to, inputs, outputs);
                }
            }
        }
    }
}

// out[t] = the sum over slots s of weights[t, s] * x[rows[t, s]].
template <typename T>
void weighted_sum(const T *x, const int64_t *rows, const float *weights, T *out, int64_t tokens, int64_t slots,
                  int64_t width, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < width; i += LANES) {
            Vec sum = {};
            for (int64_t s = t * slots; s < (t + 1) * slots; s++) sum = fused(all(weights[s]), load(x + rows[s] * width + i), sum);
            for (int64_t lane = 0; lane < LANES; lane++) store(out + t * width + i + lane, sum[lane]);
        }
}

// Softmax in place of `len` scores; behind them there is room up to a multiple of LANES.
inline void softmax(float *scores, int64_t len) {
    float most = -INFINITY;
    for (int64_t l = 0; l < len; l++) most = scores[l] > most ? scores[l] : most;
    Vec sum = {};
    for (int64_t l = 0; l < len; l += LANES) {
        for (int64_t i = len; i < l + LANES; i++) scores[i] = most;
        Vec e = exp_of(load(scores + l) - most);
        for (int64_t i = len - l; i < LANES; i++) e[i] = 0;
        *(Vec *)(scores + l) = e;
        sum += e;
    }
    const float share = 1 / sum_of(sum);
    for (int64_t l = 0; l < len; l++) scores[l] *= share;
}

// Query t, `[heads, key_dim]`, over the lens[t] keys that begin at slot first[t] of `[slots, kv_heads, dim]`. Threads
// share the tokens, and if there are fewer of these than threads, the heads too.
template <typename T>
void attention(const float *queries, const T *keys, const T *values, T *out, const int64_t *first, const int64_t *lens,
               int64_t tokens, int64_t kv_heads, int64_t repeat, int64_t key_dim, int64_t value_dim, float scale,
               float *scratch, int64_t scratch_size, int threads) {
    const int64_t heads = kv_heads * repeat, parts = tokens < threads ? kv_heads : 1, some = kv_heads / parts;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < tokens * parts; item++) {
        const int64_t t = item / parts, from = item % parts * some, rows = some * repeat;
        const int64_t len = lens[t], room = (len + LANES - 1) / LANES * LANES;
        float *scores = scratch + omp_get_thread_num() * scratch_size, *sums = scores + rows * room;
        const float *query = queries + (t * heads + from * repeat) * key_dim;
        for (int64_t l = 0; l < len; l++) {
            const T *key = keys + ((first[t] + l) * kv_heads + from) * key_dim;
            for (int64_t h = 0; h < some; h++, key += key_dim)
                for (int64_t r = h * repeat; r < (h + 1) * repeat; r++) {
                    Vec sum = {};
                    for (int64_t d = 0; d < key_dim; d += LANES)
                        sum = fused(load(query + r * key_dim + d), load(key + d), sum);
                    scores[r * room + l] = scale * sum_of(sum);
                }
        }
        for (int64_t r = 0; r < rows; r++) softmax(scores + r * room, len);
        memset(sums, 0, rows * value_dim * sizeof *sums);
        for (int64_t l = 0; l < len; l++) {
            const T *value = values + ((first[t] + l) * kv_heads + from) * value_dim;
            for (int64_t h = 0; h < some; h++, value += value_dim)
                for (int64_t r = h * repeat; r < (h + 1) * repeat; r++) {
                    const Vec weight = all(scores[r * room + l]);
                    for (int64_t d = 0; d < value_dim; d += LANES) {
                        Vec *sum = (Vec *)(sums + r * value_dim + d);
                        *sum = fused(weight, load(value + d), *sum);
                    }
                }
        }
        T *to = out + (t * heads + from * repeat) * value_dim;
        for (int64_t i = 0; i < rows * value_dim; i++) store(to + i, sums[i]);
    }
}

}  // namespace

#define EXPORTED(T, NAME)                                                                                             \
    extern "C" void grouped_linear_##NAME(const T *x, const T *weights, T *out, const int64_t *experts,           \
                                          const int64_t *starts, const int64_t *heights, int64_t groups,              \
                                          int64_t inputs, int64_t outputs, int threads) {                             \
        grouped_linear(x, weights, out, experts, starts, heights, groups, inputs, outputs, threads);                  \
    }                                                                                                                 \
    extern "C" void weighted_sum_##NAME(const T *x, const int64_t *rows, const float *weights, T *out,                \
                                        int64_t tokens, int64_t slots, int64_t width, int threads) {                  \
        weighted_sum(x, rows, weights, out, tokens, slots, width, threads);                                           \
    }                                                                                                                 \
    extern "C" void attention_##NAME(const float *queries, const T *keys, const T *values, T *out,                    \
                                     const int64_t *first, const int64_t *lens, int64_t tokens, int64_t kv_heads,     \
                                     int64_t repeat, int64_t key_dim, int64_t value_dim, float scale, float *scratch, \
                                     int64_t scratch_size, int threads) {                                             \
        attention(queries, keys, values, out, first, lens, tokens, kv_heads, repeat, key_dim, value_dim, scale,       \
                  scratch, scratch_size, threads);                                                                    \
    }
EXPORTED(float, float32)
EXPORTED(BFloat16, bfloat16)
