// Products by the registers of AVX-512, for CPUs without matrix units: bf16 weights become fp32 on the way.
#pragma once
#include "native_matrix.h"

inline int64_t grant_units() { return 0; }

class Units {
   public:
    Units() {}  // a variable of a type without one counts as unused
};

// Sums of products of BLOCKS blocks, `apart` numbers from each other and each as `Matrix` has them, with x [TOKENS, stride].
template <int TOKENS, int BLOCKS>
inline void multiply_some(const bf16* weights, int64_t apart, int64_t num_inputs, const float* x, int64_t stride,
                          __m512 (&sums)[BLOCKS][TOKENS]) {
    constexpr int CHAINS = TOKENS <= 4 ? 2 : 1;  // a sum waits for the one before it; with few of them, none is ready
    const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
    __m512 of_chain[CHAINS][BLOCKS][TOKENS];
    for (auto& chain : of_chain)
        for (auto& block : chain)
            for (__m512& sum : block) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < num_inputs; k += 2) {
        __m512 even[BLOCKS], odd[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) {
            const __m512i both = _mm512_loadu_si512(weights + b * apart + k * WIDTH);
            even[b] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            odd[b] = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
        }
        for (int m = 0; m < TOKENS; ++m) {
            const __m512 first = _mm512_set1_ps(x[m * stride + k]), second = _mm512_set1_ps(x[m * stride + k + 1]);
            for (int b = 0; b < BLOCKS; ++b) {
                of_chain[0][b][m] = _mm512_fmadd_ps(even[b], first, of_chain[0][b][m]);
                of_chain[CHAINS - 1][b][m] = _mm512_fmadd_ps(odd[b], second, of_chain[CHAINS - 1][b][m]);
            }
        }
    }
    for (int b = 0; b < BLOCKS; ++b)
        for (int m = 0; m < TOKENS; ++m)
            sums[b][m] = CHAINS == 2 ? _mm512_add_ps(of_chain[0][b][m], of_chain[1][b][m]) : of_chain[0][b][m];
}

// 4 inputs of two blocks, as unsigned bytes: OFFSET more than the weights are.
template <int BITS>
constexpr int OFFSET = 1 << (BITS - 1);

template <int BITS>
inline void load_quantised(const int8_t* packed, int64_t block, int64_t num_inputs, int64_t k, __m512i (&weights)[2]) {
    if constexpr (BITS == 8) {
        const __m512i offset = _mm512_set1_epi8(int8_t(-OFFSET<8>));  // to add it and to flip the highest bit is the same
        for (int b = 0; b < 2; ++b)
            weights[b] = _mm512_xor_si512(
                _mm512_loadu_si512(packed + (block + b) * WIDTH * num_inputs + k * WIDTH), offset);
    } else {
        const __m512i half = _mm512_set1_epi8(0x0f);
        const __m512i both = _mm512_loadu_si512(packed + block / 2 * WIDTH * num_inputs + k * WIDTH);
        weights[0] = _mm512_and_si512(both, half);
        weights[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    }
}

// Adds to each sum its products of 4 unsigned weights with 4 signed inputs.
inline __m512i add_products(__m512i sums, __m512i weights, __m512i inputs) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sums, weights, inputs);
#else
    const __m512i lower = _mm512_set1_epi16(0x00ff);
    const __m512i of_even =
        _mm512_madd_epi16(_mm512_and_si512(weights, lower), _mm512_srai_epi16(_mm512_slli_epi16(inputs, 8), 8));
    const __m512i of_odd = _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), _mm512_srai_epi16(inputs, 8));
    return _mm512_add_epi32(sums, _mm512_add_epi32(of_even, of_odd));
#endif
}

// Calls work(how many tokens, the first of them), up to MOST at a time. The number is a constant, so that their sums stay in
// registers, and weights are widened once for all of them.
template <int MOST, class Work>
inline void in_chunks(int64_t num_tokens, Work work, int64_t first = 0) {
    for (; num_tokens - first >= MOST; first += MOST) work(std::integral_constant<int, MOST>(), first);
    if constexpr (MOST > 1) in_chunks<MOST - 1>(num_tokens, work, first);
}

// What a matrix is multiplied with: tokens [num_tokens, stride].
class Inputs {
   public:
    void take(const Matrix& matrix, const bf16* x, int64_t stride, int64_t num_tokens) {
        size_ = matrix.num_inputs, num_tokens_ = num_tokens;
        if (matrix.bits == 16) {
            numbers_.resize(num_tokens * size_);
            for (int64_t m = 0; m < num_tokens; ++m)
                for (int64_t i = 0; i < size_; i += WIDTH)
                    _mm512_storeu_ps(&numbers_[m * size_ + i], load(x + m * stride + i));
            return;
        }
        rounded_.take(x, stride, num_tokens, size_);
        sums_.resize(num_tokens * size_ / GROUP);
        for (size_t g = 0; g < sums_.size(); ++g)
            sums_[g] = _mm512_reduce_add_epi32(add_products(_mm512_setzero_si512(), _mm512_set1_epi8(1),
                                                            _mm512_loadu_si512(&rounded_.values[g * GROUP])));
    }

    // Calls take(block, token, products with that block, with the next) for blocks [begin, end), an even number.
    template <class Take>
    void multiply(const Matrix& matrix, int64_t begin, int64_t end, Take take) const {
        for (int64_t block = begin; block < end; block += 2) {
            __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            if (matrix.bias)
                for (int b = 0; b < 2; ++b) bias[b] = _mm512_loadu_ps(matrix.bias + (block + b) * WIDTH);
            const auto give = [&](auto count, int64_t first) {
                __m512 sums[2][count];
                sum(matrix, block, first, sums);
                for (int m = 0; m < count; ++m)
                    take(block, first + m, _mm512_add_ps(bias[0], sums[0][m]), _mm512_add_ps(bias[1], sums[1][m]));
            };
            if (matrix.bits == 16)
                in_chunks<8>(num_tokens_, give);
            else
                in_chunks<4>(num_tokens_, give);
        }
    }

   private:
    template <int TOKENS>
    void sum(const Matrix& matrix, int64_t block, int64_t first, __m512 (&sums)[2][TOKENS]) const {
        if (matrix.bits == 16)
            multiply_some<TOKENS, 2>(static_cast<const bf16*>(matrix.packed) + block * size_ * WIDTH, size_ * WIDTH, size_,
                                     &numbers_[first * size_], size_, sums);
        else if (matrix.bits == 8)
            multiply_quantised<8>(matrix, block, first, sums);
        else
            multiply_quantised<4>(matrix, block, first, sums);
    }

    template <int BITS, int TOKENS>
    void multiply_quantised(const Matrix& matrix, int64_t block, int64_t first, __m512 (&totals)[2][TOKENS]) const {
        const int64_t num_groups = size_ / GROUP;
        for (auto& each : totals)
            for (__m512& total : each) total = _mm512_setzero_ps();
        for (int64_t g = 0; g < num_groups; ++g) {
            __m512i sums[2][TOKENS];  // less what the offset of the weights adds
            for (auto& each : sums)
                for (int m = 0; m < TOKENS; ++m)
                    each[m] = _mm512_set1_epi32(-OFFSET<BITS> * sums_[(first + m) * num_groups + g]);
            for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 4) {
                __m512i weights[2];
                load_quantised<BITS>(static_cast<const int8_t*>(matrix.packed), block, size_, k, weights);
                for (int m = 0; m < TOKENS; ++m) {
                    int32_t inputs;
                    std::memcpy(&inputs, &rounded_.values[(first + m) * size_ + k], sizeof inputs);
                    for (int b = 0; b < 2; ++b)
                        sums[b][m] = add_products(sums[b][m], weights[b], _mm512_set1_epi32(inputs));
                }
            }
            for (int b = 0; b < 2; ++b) {
                const __m512 scale = load(matrix.scales + ((block + b) * num_groups + g) * WIDTH);
                for (int m = 0; m < TOKENS; ++m) {
                    const __m512 factor =
                        _mm512_mul_ps(scale, _mm512_set1_ps(rounded_.scales[(first + m) * num_groups + g]));
                    totals[b][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[b][m]), factor, totals[b][m]);
                }
            }
        }
    }

    int64_t size_, num_tokens_;
    std::vector<float> numbers_;                // [tokens, inputs]
    Rounded rounded_;
    std::vector<int32_t> sums_;  // [tokens, groups], of rounded inputs
};

// What a thread needs to let up to 16 queries look at one head's keys and values.
class Attention {
   public:
    Attention(int64_t length, int64_t head_dim)
        : size_(head_dim), room_((length + TILE - 1) / TILE * TILE), queries_(TILE * head_dim), tail_(TILE * head_dim),
          packed_(TILE * head_dim), numbers_(TILE * head_dim), scores_(TILE * room_), weights_(TILE * room_) {}

    // the place of a query, 0 to 15
    bf16* query(int64_t index) { return queries_.data() + index * size_; }

    // keys, values: [places, head_dim]; query i sees the first lengths[i] of them. Calls take(i, begin, low, high) with
    // what query i comes to in dimensions [begin, begin + 32).
    template <class Take>
    void attend(const bf16* keys, const bf16* values, const int64_t* lengths, int64_t num_queries, Take take) {
        const int64_t length = *std::max_element(lengths, lengths + num_queries);
        const float scale = 1.f / std::sqrt(float(size_));
        score(keys, length, num_queries);
        float inverses[TILE];
        for (int64_t i = 0; i < num_queries; ++i)
            inverses[i] = 1.f / exponentials(&scores_[i * room_], lengths[i], length, scale, &weights_[i * room_]);
        for (int64_t begin = 0; begin < size_; begin += 2 * WIDTH)
            in_chunks<8>(num_queries, [&](auto count, int64_t first) {
                __m512 low[count], high[count];
                for (int i = 0; i < count; ++i) low[i] = high[i] = _mm512_setzero_ps();
                for (int64_t place = 0; place < length; ++place) {
                    const bf16* from = values + place * size_ + begin;
                    const __m512 of_low = load(from), of_high = load(from + WIDTH);
                    for (int i = 0; i < count; ++i) {
                        const __m512 weight = _mm512_set1_ps(weights_[(first + i) * room_ + place]);
                        low[i] = _mm512_fmadd_ps(weight, of_low, low[i]);
                        high[i] = _mm512_fmadd_ps(weight, of_high, high[i]);
                    }
                }
                for (int i = 0; i < count; ++i) {
                    const __m512 inverse = _mm512_set1_ps(inverses[first + i]);
                    take(first + i, begin, _mm512_mul_ps(low[i], inverse), _mm512_mul_ps(high[i], inverse));
                }
            });
    }

   private:
    // scores_[query, place]: the keys of 16 places are packed as a block of weights is
    void score(const bf16* keys, int64_t length, int64_t num_queries) {
        for (int64_t i = 0; i < num_queries * size_; i += WIDTH) _mm512_storeu_ps(&numbers_[i], load(&queries_[i]));
        alignas(64) float pairs[TILE][WIDTH];  // [place, pair of dimensions]
        for (int64_t place = 0; place < length; place += TILE) {
            const bf16* from = whole_rows(keys, size_, place, length, TILE, tail_);
            for (int64_t begin = 0; begin < size_; begin += 2 * WIDTH) {
                for (int64_t i = 0; i < TILE; ++i) std::memcpy(pairs[i], from + i * size_ + begin, sizeof pairs[i]);
                transpose(pairs, reinterpret_cast<float*>(&packed_[begin * TILE]), WIDTH);
            }
            in_chunks<8>(num_queries, [&](auto count, int64_t first) {
                __m512 sums[1][count];
                multiply_some<count, 1>(packed_.data(), 0, size_, &numbers_[first * size_], size_, sums);
                for (int i = 0; i < count; ++i) _mm512_storeu_ps(&scores_[(first + i) * room_ + place], sums[0][i]);
            });
        }
    }

    const int64_t size_, room_;
    std::vector<bf16> queries_, tail_, packed_;
    std::vector<float> numbers_, scores_, weights_;  // numbers_: the queries
};
