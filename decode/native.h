// Sixteen numbers at a time, in registers of AVX-512.
#pragma once
#include <immintrin.h>

#include <cstdint>

using bf16 = uint16_t;
constexpr int64_t WIDTH = 16;  // the fp32 lanes of a register

// the first `count` lanes
inline __mmask16 inside(int64_t count) { return __mmask16(count >= WIDTH ? 0xffff : count > 0 ? (1 << count) - 1 : 0); }

inline __m512 load(const bf16* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// to the nearest bf16, of two equally near ones to the even one
inline __m256i to_bf16(__m512 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x), last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));  // what is no number stays none
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet), 16));
#endif
}

inline void store(bf16* to, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(x)); }

inline void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }

inline __m512 rounded(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(x)), 16));
}

// e^x as 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; relative error below 1e-6
inline __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.f), _mm512_max_ps(_mm512_set1_ps(-87.f), x));  // in this order a NaN stays one
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.f / 720);
    for (const float coefficient : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(sum, n);
}
