/* Compares tanh_(), exp_() and log1p_() of vectors.h with double precision, on every `step`-th float. Prints the largest errors of each, in
 * units of the last place, and what they return for NaN and infinities. Compiled by test_vectors.py.
 */
#include <float.h>
#include <stdio.h>

#include "vectors.h"

static double ulps(float found, double exact) {
    int exponent;
    frexp(exact, &exponent);
    double unit = ldexp(1.0, exponent - 24), smallest = ldexp(1.0, -149);
    return fabs(found - exact) / (unit > smallest ? unit : smallest);
}

/* Return the largest error of f on the floats from bit pattern `from` to `to`. */
static double worst(vf (*f)(vf), double (*exact)(double), uint32_t from, uint32_t to, uint32_t step) {
    double largest = 0;
    for (uint32_t bits = from; bits < to; bits += step) {
        float x, found;
        memcpy(&x, &bits, 4);
        found = f(broadcast(x))[VL - 1];
        double error = ulps(found, exact(x));
        if (!(error <= largest)) largest = error;
    }
    return largest;
}

static vf tanh_of(vf x) { return tanh_(x); }
static vf exp_of(vf x) { return exp_(x); }
static vf log1p_of(vf x) { return log1p_(x); }
static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

int main(void) {
    const uint32_t step = 1997, negative = 1u << 31;
    double positive_tanh = worst(tanh_of, tanh, 0, bits_of(FLT_MAX), step);
    double negative_tanh = worst(tanh_of, tanh, negative, bits_of(-FLT_MAX), step);
    printf("%g %g ", positive_tanh, negative_tanh);
    printf("%g %g ", worst(exp_of, exp, 0, bits_of(88.0f), step), worst(exp_of, exp, negative, bits_of(-86.0f), step));
    printf("%g ", worst(log1p_of, log1p, 0, bits_of(0x1p125f), step));
    printf("%g %g %g %g\n", log1p_of(broadcast(NAN))[0], tanh_of(broadcast(INFINITY))[0], tanh_of(broadcast(-INFINITY))[0], tanh_of(broadcast(NAN))[0]);
    return 0;
}
