// What decode steps spend their time in: products and attention of few rows, which are bound by the bytes of the
// weights and keys that they read (each is read once, in order, and prefetched), and the short operations around them.
// Compiled by native_build.py; weights, keys and hidden states are float32 or bfloat16, sums are float32. A row's
// result has the same bits among any number of rows, and with any number of threads.
#include "vectors.h"

extern "C" int omp_get_thread_num(void);   // from the OpenMP library that torch has loaded

namespace {

constexpr int64_t MOST_ROWS = 8, AHEAD_BYTES = 8192, AHEAD_KEY_BYTES = 12288, LINE_BYTES = 64;

// sums[r] += elementwise products of LINE_BYTES of `weight` and of `rows` rows of `x`, `step` values apart.
template <int rows>
inline __attribute__((always_inline)) void multiply(const float *x, int64_t step, const float *weight, Vec *sums) {
    const Vec w = load(weight);
    for (int r = 0; r < rows; r++) sums[r] = fused(load(x + r * step), w, sums[r]);
}
template <int rows>
inline __attribute__((always_inline)) void multiply(const BFloat16 *x, int64_t step, const BFloat16 *weight,
                                                    Vec *sums) {
#ifdef __AVX512BF16__
    const __m512bh w = cast<__m512bh>(_mm512_loadu_si512(weight));
    for (int r = 0; r < rows; r++)
        sums[r] = (Vec)_mm512_dpbf16_ps((__m512)sums[r], cast<__m512bh>(_mm512_loadu_si512(x + r * step)), w);
#else
    const Vec low = load(weight), high = load(weight + LANES);
    for (int r = 0; r < rows; r++) {
        sums[r] = fused(load(x + r * step), low, sums[r]);
        sums[r] = fused(load(x + r * step + LANES), high, sums[r]);
    }
#endif
}

// `rows` rows of `x` times one row of a weight. One or two are so quick that the processor fetches what comes next by
// itself; for more, it is asked to, into the second cache: the first has too few lines on their way at once.
template <int rows, typename T>
inline __attribute__((always_inline)) void product(const T *x, int64_t step, const T *weight, T *out,
                                                   int64_t inputs, int64_t outputs) {
    Vec sums[rows] = {};
    for (int64_t k = 0; k < inputs; k += LINE_BYTES / sizeof(T)) {
        if (rows > 2) __builtin_prefetch((const char *)(weight + k) + AHEAD_BYTES, 0, 2);
        multiply<rows>(x + k, step, weight + k, sums);
    }
    for (int r = 0; r < rows; r++) store(out + r * outputs, sum_of(sums[r]));
}

// Rows [starts[g], starts[g] + heights[g]) of `x`, `step` values apart, times the transposed weight of experts[g]. This
// and what follows is shared by the team of threads that calls it.
template <typename T>
void linear(const T *x, int64_t step, const T *weights, T *out, const int64_t *experts, const int64_t *starts,
            const int64_t *heights, int64_t groups, int64_t inputs, int64_t outputs, int threads) {
    // A thread that is held up leaves its share to the others.
    const int64_t parts = threads > 1 ? (groups > 2 * threads ? 2 : 4 * threads) : 1;
    #pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < groups * parts; item++) {
        const int64_t g = item / parts, part = item % parts;
        const int64_t first = outputs * part / parts, last = outputs * (part + 1) / parts;
        for (int64_t o = first; o < last; o++) {
            const T *weight = weights + (experts[g] * outputs + o) * inputs;
            for (int64_t r = 0; r < heights[g]; r += MOST_ROWS) {
                const T *row = x + (starts[g] + r) * step;
                T *to = out + (starts[g] + r) * outputs + o;
                switch (heights[g] - r) {
                    case 1: product<1>(row, step, weight, to, inputs, outputs); break;
                    case 2: product<2>(row, step, weight, to, inputs, outputs); break;
                    case 3: product<3>(row, step, weight, to, inputs, outputs); break;
                    case 4: product<4>(row, step, weight, to, inputs, outputs); break;
                    case 5: product<5>(row, step, weight, to, inputs, outputs); break;
                    case 6: product<6>(row, step, weight, to, inputs, outputs); break;
                    case 7: product<7>(row, step, weight, to, inputs, outputs); break;
                    default: product<MOST_ROWS>(row, step, weight, to, inputs, outputs);
                }
            }
        }
    }
}

// out[t] = the sum over slots s of weights[t, s] * x[rows[t, s]].
template <typename T>
void weighted_sum(const T *x, const int64_t *rows, const float *weights, T *out, int64_t tokens, int64_t slots,
                  int64_t width) {
    #pragma omp for
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < width; i += LANES) {
            Vec sum = {};
            for (int64_t s = t * slots; s < (t + 1) * slots; s++)
                sum = fused(all(weights[s]), load(x + rows[s] * width + i), sum);
            store(out + t * width + i, sum);
        }
}

// A whole experts module: silu(gate) * up, for ids `[tokens, slots]`. Returns whether it computed: not for an id that
// is no expert's, and not if an expert has more than `most_rows`. `plan` holds 4 * num_experts + tokens * slots
// integers, `scratch` hidden + 2 * inner values for each of tokens * slots.
template <typename T>
bool gated_experts(const T *x, const int64_t *ids, const float *weights, const T *gate_up, const T *down, T *out,
                   int64_t *plan, T *scratch, int64_t tokens, int64_t slots, int64_t num_experts, int64_t hidden,
                   int64_t inner, int64_t most_rows, int threads) {
    const int64_t pairs = tokens * slots;
    int64_t *hit = plan, *starts = hit + num_experts, *heights = starts + num_experts, *next = heights + num_experts;
    int64_t *row = next + num_experts, groups = 0, begin = 0;
    memset(next, 0, num_experts * sizeof *next);
    for (int64_t p = 0; p < pairs; p++) {
        if (ids[p] < 0 || ids[p] >= num_experts || ++next[ids[p]] > most_rows) return false;
    }
    for (int64_t e = 0; e < num_experts; e++) {
        const int64_t height = next[e];
        if (height > 0) hit[groups] = e, starts[groups] = begin, heights[groups++] = height;
        next[e] = begin;
        begin += height;
    }
    for (int64_t p = 0; p < pairs; p++) row[p] = next[ids[p]]++;
    T *rows = scratch, *projected = scratch + pairs * hidden;
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        #pragma omp for
        for (int64_t p = 0; p < pairs; p++) memcpy(rows + row[p] * hidden, x + p / slots * hidden, hidden * sizeof *x);
        linear(rows, hidden, gate_up, projected, hit, starts, heights, groups, hidden, 2 * inner, threads);
        #pragma omp for
        for (int64_t p = 0; p < pairs; p++) {
            T *gate = projected + p * 2 * inner;
            for (int64_t i = 0; i < inner; i += LANES)
                store(gate + i, rounded(gate, silu(load(gate + i))) * load(gate + inner + i));
        }
        linear(projected, 2 * inner, down, rows, hit, starts, heights, groups, inner, hidden, threads);
        weighted_sum(rows, row, weights, out, tokens, slots, hidden);
    }
    return true;
}

// weight * x / sqrt(mean(x * x) + eps) of each row, rounded before it is multiplied by the weight.
template <typename T>
void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const T *row = x + r * width;
        Vec sum = {};
        for (int64_t i = 0; i < width; i += LANES) sum = fused(load(row + i), load(row + i), sum);
        const float scale = 1 / sqrtf(sum_of(sum) / width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(out + r * width + i, load(weight + i) * rounded(row, load(row + i) * scale));
    }
}

// Softmax in place of `len` scores; behind them there is room up to a multiple of LANES.
inline void softmax(float *scores, int64_t len) {
    for (int64_t l = len; l % LANES; l++) scores[l] = scores[len - 1];
    Vec highest = load(scores), sum = {};
    for (int64_t l = LANES; l < len; l += LANES) highest = load(scores + l) > highest ? load(scores + l) : highest;
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
    for (int64_t l = 0; l < len; l += LANES) {
        Vec e = exp_of(load(scores + l) - most);
        for (int64_t i = len - l; i < LANES; i++) e[i] = 0;
        *(Vec *)(scores + l) = e;
        sum += e;
    }
    const float share = 1 / sum_of(sum);
    for (int64_t l = 0; l < len; l++) scores[l] *= share;
}

// Keys or values of one head: `count` rows, `step` values apart.
template <typename T> struct Rows {
    const T *at;
    int64_t step, count;
    const T *row(int64_t l) const { return at + (l < count ? l : count - 1) * step; }
};

inline void fetch(const char *line) { __builtin_prefetch(line, 0, 2); }

// What is brought to the second cache while a head's next rows are read: as many later ones, `step` bytes apart. Heads
// that lie side by side share these in the order of memory, which is not that of head after head.
struct Ahead {
    const char *at;
    int64_t step, width;
    bool side_by_side;
    Ahead(const void *rows, int64_t step, int64_t heads, int64_t width, int64_t head, int64_t count)
        : width(width), side_by_side(heads * width == step) {
        at = (const char *)rows + (side_by_side ? AHEAD_KEY_BYTES + head * count * width
                                                : AHEAD_KEY_BYTES / (heads * width) * step + head * width);
        this->step = side_by_side ? width : step;
    }
    void fetch_all(int64_t count) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t b = 0; b < width; b += LINE_BYTES) fetch(at + i * step + b);
    }
};

// Queries of one head go together, and LANES of their scores are added up at once. A query that is alone reads the keys
// of all heads in the order in which they lie, which the processor fetches itself.
constexpr int64_t rows_at_once(int together) { return together == 1 ? 1 : 4 * together; }

// Scores of `together` queries of one head for the next rows_at_once keys; the last one is repeated.
template <int together, typename T>
inline void score(const float *query, const Rows<T> &keys, int64_t dim, float scale, float *scores, int64_t room,
                  const char *next) {
    constexpr int some = together == 1 ? 1 : LANES / together;
    for (int64_t l = 0; l < rows_at_once(together); l += some) {
        Vec sums[together * some] = {};
        for (int64_t d = 0; d < dim; d += LANES)
            for (int i = 0; i < some; i++) {
                const Vec key = load(keys.row(l + i) + d);
                if (together > 1 && next && d * sizeof(T) % LINE_BYTES == 0) fetch(next), next += LINE_BYTES;
                for (int r = 0; r < together; r++)
                    sums[r * some + i] = fused(load(query + r * dim + d), key, sums[r * some + i]);
            }
        if (together == 1) {
            scores[l] = scale * sum_of(sums[0]);
        } else {
            const Vec found = scale * sums_of(sums);
            for (int r = 0; r < together; r++)
                memcpy(scores + r * room + l, (float *)&found + r * some, some * sizeof *scores);
        }
    }
}

// sums += weights * values, of `together` queries of one head over the next rows_at_once values, for `wide` vectors.
template <int together, int wide, typename T>
inline void accumulate(const float *weights, int64_t room, const Rows<T> &values, int64_t d, int64_t dim, float *sums) {
    const int64_t count = values.count < rows_at_once(together) ? values.count : rows_at_once(together);
    Vec sum[together][wide];
    for (int r = 0; r < together; r++)
        for (int i = 0; i < wide; i++) sum[r][i] = load(sums + r * dim + d + i * LANES);
    for (int64_t l = 0; l < count; l++)
        for (int i = 0; i < wide; i++) {
            const Vec value = load(values.at + l * values.step + d + i * LANES);
            for (int r = 0; r < together; r++) sum[r][i] = fused(all(weights[r * room + l]), value, sum[r][i]);
        }
    for (int r = 0; r < together; r++)
        for (int i = 0; i < wide; i++) *(Vec *)(sums + r * dim + d + i * LANES) = sum[r][i];
}

// `rows` queries, `repeat` of each head, over `len` keys.
template <int together, typename T>
void attend(const float *query, const T *keys, const T *values, int64_t key_step, int64_t value_step, int64_t len,
            int64_t rows, int64_t repeat, int64_t key_dim, int64_t value_dim, float scale, float *scores, float *sums) {
    constexpr int64_t some = rows_at_once(together), size = sizeof(T);
    const int64_t room = (len + LANES - 1) / LANES * LANES, heads = rows / repeat;
    const auto ahead = [&](const T *first, int64_t step, int64_t dim, int64_t head) {
        return Ahead(first, step * size, heads, dim * size, head, some);
    };
    for (int64_t l = 0; l < len; l += some)
        for (int64_t r = 0; r < rows; r += together) {
            const int64_t head = r / repeat;
            const Rows<T> left{keys + l * key_step + head * key_dim, key_step, len - l};
            const Ahead next = ahead(keys + l * key_step, key_step, key_dim, head);
            if (together > 1 && r % repeat == 0 && !next.side_by_side) next.fetch_all(some);
            score<together>(query + r * key_dim, left, key_dim, scale, scores + r * room + l, room,
                            r % repeat == 0 && next.side_by_side ? next.at : nullptr);
        }
    for (int64_t r = 0; r < rows; r++) softmax(scores + r * room, len);
    memset(sums, 0, rows * value_dim * sizeof *sums);
    for (int64_t l = 0; l < len; l += some)
        for (int64_t r = 0; r < rows; r += together) {
            const int64_t head = r / repeat;
            const Rows<T> left{values + l * value_step + head * value_dim, value_step, len - l};
            const Ahead next = ahead(values + l * value_step, value_step, value_dim, head);
            if (together > 1 && r % repeat == 0) next.fetch_all(some);
            const float *weights = scores + r * room + l;
            float *to = sums + r * value_dim;
            int64_t d = 0;
            for (; d + 4 * LANES <= value_dim; d += 4 * LANES)
                accumulate<together, 4>(weights, room, left, d, value_dim, to);
            for (; d < value_dim; d += LANES)
                accumulate<together, 1>(weights, room, left, d, value_dim, to);
        }
}

// Query t, `[heads, key_dim]`, over the lens[t] keys that begin at slot first[t] of `[slots, kv_heads, dim]`. Threads
// share the tokens, and if there are fewer of these than threads, the heads too.
template <typename T>
void attention(const float *queries, const T *keys, const T *values, T *out, const int64_t *first, const int64_t *lens,
               int64_t tokens, int64_t kv_heads, int64_t repeat, int64_t key_dim, int64_t value_dim, float scale,
               float *scratch, int64_t scratch_size, int threads) {
    const int64_t heads = kv_heads * repeat, parts = tokens < threads ? kv_heads : 1, some = kv_heads / parts;
    const auto attend_all = repeat % 4 == 0 ? attend<4, T> : repeat % 2 == 0 ? attend<2, T> : attend<1, T>;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < tokens * parts; item++) {
        const int64_t t = item / parts, from = item % parts * some, rows = some * repeat;
        const int64_t row = t * heads + from * repeat, slot = first[t] * kv_heads + from;
        float *sums = scratch + omp_get_thread_num() * scratch_size, *scores = sums + rows * value_dim;
        attend_all(queries + row * key_dim, keys + slot * key_dim, values + slot * value_dim, kv_heads * key_dim,
                   kv_heads * value_dim, lens[t], rows, repeat, key_dim, value_dim, scale, scores, sums);
        for (int64_t i = 0; i < rows * value_dim; i += LANES) store(out + row * value_dim + i, load(sums + i));
    }
}

}  // namespace

#define EXPORTED(T, NAME)                                                                                             \
    extern "C" void grouped_linear_##NAME(const T *x, const T *weights, T *out, const int64_t *experts,               \
                                          const int64_t *starts, const int64_t *heights, int64_t groups,              \
                                          int64_t inputs, int64_t outputs, int threads) {                             \
        _Pragma("omp parallel num_threads(threads) if (threads > 1)")                                                 \
        linear(x, inputs, weights, out, experts, starts, heights, groups, inputs, outputs, threads);                  \
    }                                                                                                                 \
    extern "C" void linear_##NAME(const T *x, const T *weight, T *out, int64_t rows, int64_t inputs, int64_t outputs, \
                                  int threads) {                                                                      \
        const int64_t none = 0;                                                                                       \
        _Pragma("omp parallel num_threads(threads) if (threads > 1)")                                                 \
        linear(x, inputs, weight, out, &none, &none, &rows, 1, inputs, outputs, threads);                             \
    }                                                                                                                 \
    extern "C" void weighted_sum_##NAME(const T *x, const int64_t *rows, const float *weights, T *out,                \
                                        int64_t tokens, int64_t slots, int64_t width, int threads) {                  \
        _Pragma("omp parallel num_threads(threads) if (threads > 1)")                                                 \
        weighted_sum(x, rows, weights, out, tokens, slots, width);                                                    \
    }                                                                                                                 \
    extern "C" bool gated_experts_##NAME(const T *x, const int64_t *ids, const float *weights, const T *gate_up,      \
                                         const T *down, T *out, int64_t *plan, T *scratch, int64_t tokens,            \
                                         int64_t slots, int64_t num_experts, int64_t hidden, int64_t inner,           \
                                         int64_t most_rows, int threads) {                                            \
        return gated_experts(x, ids, weights, gate_up, down, out, plan, scratch, tokens, slots, num_experts, hidden,  \
                             inner, most_rows, threads);                                                              \
    }                                                                                                                 \
    extern "C" void rms_norm_##NAME(const T *x, const T *weight, T *out, int64_t rows, int64_t width, float eps,      \
                                    int threads) {                                                                    \
        rms_norm(x, weight, out, rows, width, eps, threads);                                                          \
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
