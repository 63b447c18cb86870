// One pass over parameters, moments and gradients in place of several: see fuyou/optimizer/kernels.py.
//
// Additions and products are rounded where PyTorch's own kernels round them, so that the bits are the same: it is
// compiled with -ffp-contract=off, and std::fma stands where PyTorch has a fused operation.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int64_t BLOCK = 128;

// As `Job` in kernels.py.
struct Job {
    int64_t count;          // elements, a multiple of BLOCK
    void *parameter;        // bf16 where `low` is there, else fp32
    void *low;              // low bits of master weights (8 next to codes, else 16), or null
    const void *gradient;   // bf16 where `low` is there, else fp32
    void *mean, *variance;  // fp32, or codes
    float *mean_scale, *variance_scale;
    const float *values[2];  // of the codes of mean and variance
    float gradient_scale, decay, lerp, beta2, rest2, root, eps, step;
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

// Low is the type of the low bits of master weights; void where they are not split.
template <typename Low>
void load(const Job &job, int64_t at, float *__restrict weights, float *__restrict gradient) {
    if constexpr (!std::is_void_v<Low>) {
        constexpr int shift = 16 - 8 * sizeof(Low);
        const uint16_t *high = static_cast<const uint16_t *>(job.parameter) + at;
        const uint16_t *narrow = static_cast<const uint16_t *>(job.gradient) + at;
        const Low *low = static_cast<const Low *>(job.low) + at;
        for (int64_t i = 0; i < BLOCK; i++) {
            weights[i] = as_float((uint32_t(high[i]) << 16) + (uint32_t(int32_t(low[i])) << shift));
            gradient[i] = as_float(uint32_t(narrow[i]) << 16) * job.gradient_scale;
        }
    } else {
        const float *whole = static_cast<const float *>(job.parameter) + at;
        const float *wide = static_cast<const float *>(job.gradient) + at;
        for (int64_t i = 0; i < BLOCK; i++) {
            weights[i] = whole[i];
            gradient[i] = wide[i] * job.gradient_scale;
        }
    }
}

template <typename Low>
void store(const Job &job, int64_t at, const float *__restrict weights) {
    if constexpr (!std::is_void_v<Low>) {
        constexpr int width = 8 * sizeof(Low);
        uint16_t *high = static_cast<uint16_t *>(job.parameter) + at;
        Low *low = static_cast<Low *>(job.low) + at;
        for (int64_t i = 0; i < BLOCK; i++) {
            uint32_t bits = as_bits(weights[i]);
            if (width == 8) bits = (bits + 0x80) >> 8;
            low[i] = Low(bits);
            high[i] = uint16_t((bits + (1u << (width - 1))) >> width);
        }
    } else {
        std::memcpy(static_cast<float *>(job.parameter) + at, weights, BLOCK * sizeof(float));
    }
}

void decode(const Job &job, int moment, const uint8_t *__restrict codes, float scale, float *__restrict wide) {
    const float *__restrict values = job.values[moment];
    for (int64_t i = 0; i < BLOCK; i++) wide[i] = values[codes[i]] * scale;
}

template <bool SIGNED>
float encode(const float *__restrict wide, uint8_t *__restrict codes) {
    int32_t largest = 0;  // bits of magnitudes are ordered as the magnitudes are
    for (int64_t i = 0; i < BLOCK; i++) {
        int32_t size = int32_t(as_bits(wide[i]) & 0x7fffffff);
        largest = size > largest ? size : largest;
    }
    const float scale = as_float(uint32_t(largest)), divisor = scale > 0 ? scale : 1;
    for (int64_t i = 0; i < BLOCK; i++) {
        const float quotient = wide[i] / divisor;
        float level;
        if (SIGNED) {
            level = std::rint(2 * quotient / (1 + std::fabs(quotient)) * 127);
        } else {
            level = std::rint(std::sqrt(quotient) * 255);
            level = quotient > 0 && level < 1 ? 1 : level;
        }
        codes[i] = uint8_t(int32_t(level));
    }
    return scale;
}

void adamw(const Job &job, float *__restrict weights, const float *__restrict gradient, float *__restrict mean,
           float *__restrict variance) {
    const bool small = std::fabs(job.lerp) < 0.5f;
    const float weight = small ? job.lerp : job.lerp - 1;
    for (int64_t i = 0; i < BLOCK; i++) {
        float decayed = weights[i] * job.decay;
        mean[i] = std::fma(weight, gradient[i] - mean[i], small ? mean[i] : gradient[i]);
        variance[i] = std::fma(job.rest2 * gradient[i], gradient[i], job.beta2 * variance[i]);
        weights[i] = decayed + job.step * mean[i] / (std::sqrt(variance[i]) / job.root + job.eps);
    }
}

void adamw_split(const Job &job) {
    float weights[BLOCK], gradient[BLOCK];
    for (int64_t at = 0; at < job.count; at += BLOCK) {
        load<int16_t>(job, at, weights, gradient);
        adamw(job, weights, gradient, static_cast<float *>(job.mean) + at, static_cast<float *>(job.variance) + at);
        store<int16_t>(job, at, weights);
    }
}

template <typename Low>
void adamw_blockwise(const Job &job) {
    float weights[BLOCK], gradient[BLOCK], mean[BLOCK], variance[BLOCK];
    for (int64_t at = 0; at < job.count; at += BLOCK) {
        uint8_t *means = static_cast<uint8_t *>(job.mean) + at, *variances = static_cast<uint8_t *>(job.variance) + at;
        float *scale = job.mean_scale + at / BLOCK, *other = job.variance_scale + at / BLOCK;
        load<Low>(job, at, weights, gradient);
        decode(job, 0, means, *scale, mean);
        decode(job, 1, variances, *other, variance);
        adamw(job, weights, gradient, mean, variance);
        *scale = encode<true>(mean, means);
        *other = encode<false>(variance, variances);
        store<Low>(job, at, weights);
    }
}

}  // namespace

extern "C" {
void update_adamw(const Job *job) { adamw_split(*job); }
void update_adamw8bit(const Job *job) { job->low ? adamw_blockwise<int8_t>(*job) : adamw_blockwise<void>(*job); }
}
