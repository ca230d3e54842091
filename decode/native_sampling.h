// Distributions as logits and what is left of them, and the noise that chooses a token.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstring>

#include "native.h"

// log(1 + x) by the series of the inverse hyperbolic tangent; x in [-1/4, 1/2], relative error below 1e-6
inline __m512 log_of_one_plus(__m512 x) {
    const __m512 ratio = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(2.f), x));
    const __m512 square = _mm512_mul_ps(ratio, ratio);
    __m512 sum = _mm512_set1_ps(2.f / 9);
    for (const float coefficient : {2.f / 7, 2.f / 5, 2.f / 3, 2.f})
        sum = _mm512_fmadd_ps(sum, square, _mm512_set1_ps(coefficient));
    return _mm512_mul_ps(sum, ratio);
}

// -log(1 - x), x in (0, 1)
inline __m512 arrival(__m512 x) {
    const __m512 left = _mm512_sub_ps(_mm512_set1_ps(1.f), x);
    const __m512i three_quarters = _mm512_set1_epi32(0x3f400000);  // left = 2^n m, m in [3/4, 3/2)
    const __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(left), three_quarters);
    const __m512i n = _mm512_srai_epi32(bits, 23);
    const __m512i rest = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff));
    const __m512 m = _mm512_castsi512_ps(_mm512_add_epi32(rest, three_quarters));
    // where n is 0, 1 - x has lost what x had
    const __mmask16 near = _mm512_cmpeq_epi32_mask(n, _mm512_setzero_si512());
    const __m512 beyond = _mm512_sub_ps(m, _mm512_set1_ps(1.f));
    const __m512 log_m = log_of_one_plus(_mm512_mask_sub_ps(beyond, near, _mm512_setzero_ps(), x));
    return _mm512_fnmsub_ps(_mm512_cvtepi32_ps(n), _mm512_set1_ps(0.69314718f), log_m);
}

// `RowNoise.exponentials` of noise.py for 16 tokens
inline __m512 noise(__m512i spread, __m512i first, __m512i second) {
    __m512i mixed = _mm512_mullo_epi32(_mm512_xor_si512(spread, first), second);
    mixed = _mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 15));
    mixed = _mm512_mullo_epi32(mixed, _mm512_set1_epi32(int32_t(0xC2B2AE35)));
    mixed = _mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 16));
    const __m512 number = _mm512_cvtepi32_ps(_mm512_and_si512(mixed, _mm512_set1_epi32(0x7FFFFF7F)));
    return arrival(_mm512_mul_ps(_mm512_add_ps(number, _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-31f)));
}

inline __m512 load(const bf16* x, __mmask16 mask) {
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 weights_of(__m512 numbers, float largest, float scale) {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(numbers, _mm512_set1_ps(largest)), _mm512_set1_ps(scale));
    // below that, e^x is no normal number
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_GT_OQ), exponential(x));
}

// What top-k, top-p and min-p leave of a row: the tokens whose logits are not below a bound.
struct Kept {
    float bound, largest, total;  // total: of the weights e^((logit - largest) / temperature) that are left
    int64_t count;
};
static_assert(sizeof(Kept) == 24 && offsetof(Kept, count) == 16);

Kept truncated(const bf16* logits, int64_t size, float temperature, int64_t top_k, float top_p, float min_p);

// Which token arrives first, if token x arrives after a time exponential with rate weight[x].
class First {
   public:
    explicit First(uint64_t key)
        : first_(_mm512_set1_epi32(int32_t(key))), second_(_mm512_set1_epi32(int32_t(key >> 32) | 1)) {}

    // weights of 16 tokens from a place on, and what tells their noise apart
    void look_at(int64_t place, __mmask16 mask, __m512 weights, __m512i spread) {
        const __m512i here = _mm512_add_epi32(_mm512_set1_epi32(int32_t(place)), lanes());
        const __m512 times = noise(spread, first_, second_);
        const __m512 speeds = _mm512_div_ps(weights, times);
        const __mmask16 faster = _mm512_mask_cmp_ps_mask(mask, speeds, fastest_, _CMP_GT_OQ);
        fastest_ = _mm512_mask_mov_ps(fastest_, faster, speeds);
        places_ = _mm512_mask_mov_epi32(places_, faster, here);
    }

    int64_t place() const {
        const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(fastest_));
        return _mm512_mask_reduce_min_epu32(_mm512_cmp_ps_mask(fastest_, most, _CMP_EQ_OQ), places_);
    }

   private:
    static __m512i lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

    const __m512i first_, second_;
    __m512 fastest_ = _mm512_set1_ps(-1.f);
    __m512i places_ = _mm512_setzero_si512();
};
