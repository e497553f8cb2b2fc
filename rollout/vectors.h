// Vectors of 16 floats in plain C++, and what kernels.cpp does with them. Compiled without contraction: compilers fuse
// multiplications and additions in one variant of a loop and not in another, and rows would have other bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
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

inline void store(float *at, Vec v) { *(Vec *)at = v; }
inline void store(BFloat16 *at, Vec v) {
    const Words bits = cast<Words>(v), nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(Shorts *)at = __builtin_convertvector(v != v ? Words{} + 0x7fc0 : nearest, Shorts);
}

inline Vec rounded(const float *, Vec v) { return v; }  // to the type that is pointed to
inline Vec rounded(const BFloat16 *, Vec v) {
    BFloat16 bits[LANES];
    store(bits, v);
    return load(bits);
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

#ifdef __clang__
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// sum_of each of LANES vectors, with the same bits: half of each vector is added to its other half, for two vectors in
// one addition, then a quarter of each to its other quarter, and so on.
inline Vec sums_of(Vec *v) {
    for (int i = 0; i < 8; i++)
        v[i] = CHOSEN(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               CHOSEN(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        v[i] = CHOSEN(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               CHOSEN(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        v[i] = CHOSEN(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               CHOSEN(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return CHOSEN(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           CHOSEN(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
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

// x * sigmoid(x), by the way that does not overflow; NaN stays.
inline Vec silu(Vec x) {
    const Vec e = exp_of(x < 0.0f ? x : -x);
    const Vec share = (x < 0.0f ? e : all(1)) / (e + 1.0f);
    return x * (x < -87.0f ? Vec{} : share);
}

}  // namespace
