// Quantise and dequantise in one pass over the data: see common/quantisation/cpu_kernels.py.
//
// Products are rounded where PyTorch's kernels round them, so that the bits are the same: it is compiled with
// -ffp-contract=off.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 256, HALF = BLOCK / 2;
constexpr uint32_t INFINITE = 0x7f800000u;

// As `Job` in cpu_kernels.py.
struct Job {
    const char *rows;             // elements, bf16 or fp32, read by quantise and written by dequantise
    const char *payload;          // bytes, of a row its scales and then its values
    const int64_t *row_at, *payload_at;  // where each row begins, in bytes
    int64_t count;                // elements of a row
    int64_t first, last;          // blocks of all rows, from the first row's first on
    int32_t bits;                 // 8 or 4
    int32_t narrow;               // whether elements are bf16
    int32_t add;                  // whether dequantise adds to fp32 elements
};

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

uint16_t as_bf16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > INFINITE ? uint16_t(0x7fc0u) : uint16_t(nearest);
}

// Where a block's elements, its scale and its values are, and how many elements it has.
struct Place {
    char *elements, *scale, *values;
    int64_t count;
};

Place place_of(const Job &job, int64_t block) {
    const int64_t blocks = (job.count + BLOCK - 1) / BLOCK, row = block / blocks, at = block % blocks;
    char *payload = const_cast<char *>(job.payload) + job.payload_at[row];
    const int64_t left = job.count - at * BLOCK;
    return {const_cast<char *>(job.rows) + job.row_at[row] + at * BLOCK * (job.narrow ? 2 : 4), payload + 4 * at,
            payload + 4 * blocks + at * (BLOCK * job.bits / 8), left < BLOCK ? left : BLOCK};
}

void load(const Place &place, bool narrow, float *__restrict elements) {
    if (place.count < BLOCK) std::memset(elements, 0, BLOCK * 4);
    if (narrow) {
        uint16_t halves[BLOCK];
        std::memcpy(halves, place.elements, place.count * 2);
        if (place.count == BLOCK)
            for (int64_t i = 0; i < BLOCK; i++) elements[i] = as_float(uint32_t(halves[i]) << 16);
        else
            for (int64_t i = 0; i < place.count; i++) elements[i] = as_float(uint32_t(halves[i]) << 16);
    } else {
        std::memcpy(elements, place.elements, place.count * 4);
    }
}

template <int BITS>
void quantise_block(const Place &place, bool narrow) {
    constexpr float LARGEST = BITS == 8 ? 127.0f : 7.0f;
    float elements[BLOCK];
    load(place, narrow, elements);
    // Of magnitudes as integers the largest is the largest number, and a NaN's is larger than any.
    int32_t most = 0;
    for (int64_t i = 0; i < BLOCK; i++) {
        const int32_t magnitude = int32_t(as_bits(elements[i]) & 0x7fffffffu);
        most = magnitude > most ? magnitude : most;
    }
    const bool finite = uint32_t(most) < INFINITE;
    const float largest = as_float(uint32_t(most));
    const float scale = finite ? largest / LARGEST : as_float(0x7fc00000u);
    const float steps = finite && largest > 1e-36f ? (1.0f / largest) * LARGEST : 0.0f;
    std::memcpy(place.scale, &scale, 4);
    int8_t values[BLOCK];
    if (finite)
        for (int64_t i = 0; i < BLOCK; i++) values[i] = int8_t(int32_t(std::nearbyint(elements[i] * steps)));
    else
        std::memset(values, 0, BLOCK);
    if constexpr (BITS == 8) {
        std::memcpy(place.values, values, BLOCK);
    } else {  // the first half of a block in the low halves of its bytes
        uint8_t packed[HALF];
        for (int64_t i = 0; i < HALF; i++) packed[i] = uint8_t((values[i] & 0xf) | (values[i + HALF] << 4));
        std::memcpy(place.values, packed, HALF);
    }
}

template <int BITS>
void dequantise_block(const Place &place, bool narrow, bool add) {
    int8_t values[BLOCK];
    if constexpr (BITS == 8) {
        std::memcpy(values, place.values, BLOCK);
    } else {
        uint8_t packed[HALF];
        std::memcpy(packed, place.values, HALF);
        for (int64_t i = 0; i < HALF; i++) {
            values[i] = int8_t(int8_t(packed[i] << 4) >> 4);  // arithmetic shifts bring the sign back
            values[i + HALF] = int8_t(int8_t(packed[i]) >> 4);
        }
    }
    float scale, elements[BLOCK];
    std::memcpy(&scale, place.scale, 4);
    for (int64_t i = 0; i < BLOCK; i++) elements[i] = float(values[i]) * scale;
    if (narrow) {
        uint16_t halves[BLOCK];
        for (int64_t i = 0; i < BLOCK; i++) halves[i] = as_bf16(elements[i]);
        std::memcpy(place.elements, halves, place.count * 2);
        return;
    }
    if (add) {
        float sums[BLOCK] = {};
        std::memcpy(sums, place.elements, place.count * 4);
        for (int64_t i = 0; i < BLOCK; i++) elements[i] = sums[i] + elements[i];
    }
    std::memcpy(place.elements, elements, place.count * 4);
}

}  // namespace

extern "C" {

void quantise(const Job *job) {
    for (int64_t block = job->first; block < job->last; block++)
        job->bits == 8 ? quantise_block<8>(place_of(*job, block), job->narrow)
                       : quantise_block<4>(place_of(*job, block), job->narrow);
}

void dequantise(const Job *job) {
    for (int64_t block = job->first; block < job->last; block++)
        job->bits == 8 ? dequantise_block<8>(place_of(*job, block), job->narrow, job->add)
                       : dequantise_block<4>(place_of(*job, block), job->narrow, job->add);
}

}
