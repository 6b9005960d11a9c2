/* The activations between linears. */
#pragma once
#include "vectors.h"

enum { SILU, GELU_TANH, SIGMOID, SWIGLU_OAI, IDENTITY, GELU, RELU, RELU2, SOFTPLUS };

/* x times the normal distribution Phi(x), with a relative error below 1e-5. Phi(-size) is erfc(z) / 2, z = size /
 * sqrt(2), and erfc(z) is t exp(p(t) - z^2), t = 1 / (1 + z / 2). The polynomial p is a Chebyshev fit for z from 0 to 14. */
INLINE vf gelu_(vf x) {
    vf size = larger(-x, x), t = 1.0f / fma_(size, broadcast(0.353553391f), broadcast(1.0f)), p = broadcast(-0.19184048f);
    p = fma_(p, t, broadcast(0.76851281f));
    p = fma_(p, t, broadcast(-1.03015518f));
    p = fma_(p, t, broadcast(0.37635739f));
    p = fma_(p, t, broadcast(-0.05336222f));
    p = fma_(p, t, broadcast(0.39794404f));
    p = fma_(p, t, broadcast(0.99798345f));
    p = fma_(p, t, broadcast(-1.26544062f));
    vf tail = exp_(fma_(size * size, broadcast(-0.5f), p)) * t * 0.5f;
    return x * blend(x > 0.0f, 1.0f - tail, tail);
}

/* Return activation(x). GELU by tanh is x / 2 (1 + tanh(u)), which is x / (1 + exp(-2 u)). */
INLINE vf activate(ptrdiff_t activation, vf x) {
    switch (activation) {
    case SILU: return silu_(x);
    case GELU_TANH: return x / (exp_(x * fma_(x * x, broadcast(-0.0713548163f), broadcast(-1.59576912f))) + 1.0f);
    case SIGMOID: return 1.0f / (exp_(-x) + 1.0f);
    case GELU: return gelu_(x);
    case RELU: return larger(broadcast(0.0f), x);
    case RELU2: x = larger(broadcast(0.0f), x); return x * x;
    case SOFTPLUS: return softplus_(x);
    default: return x;
    }
}

/* SwiGLU as in gpt-oss: gate and x are clamped, and 1 is added to x. */
INLINE vf swiglu_oai_(vf gate, vf x) {
    gate = smaller(broadcast(7.0f), gate), x = smaller(broadcast(7.0f), larger(broadcast(-7.0f), x));
    return gate / (exp_(gate * -1.702f) + 1.0f) * (x + 1.0f);
}
