// Dropout's random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// The mask is a function of (seed, offset, batch, head, query, key) alone, hence equal in forward, backward, recompute,
// on every backend and for every block size.
#pragma once
#include <cstdint>

#include "common/inline.h"

namespace msf {

struct PhiloxKey {
  uint32_t k0, k1, offset;
  MSF_ALWAYS_INLINE PhiloxKey(uint64_t seed, uint64_t off)
      : k0(uint32_t(seed)), k1(uint32_t(seed >> 32) + uint32_t(off >> 32)), offset(uint32_t(off)) {}
};

// U is uint32_t or a vector of them; mul(a, m, &hi) returns the low half of a * m.
template <class U, class Mul>
MSF_ALWAYS_INLINE inline void philox4x32_10(U (&c)[4], uint32_t k0, uint32_t k1, Mul mul) {
  for (int round = 0; round < 10; ++round) {
    U h0, h1;
    U l0 = mul(c[0], 0xD2511F53u, &h0), l1 = mul(c[2], 0xCD9E8D57u, &h1);
    c[0] = h1 ^ c[1] ^ k0;
    c[1] = l1;
    c[2] = h0 ^ c[3] ^ k1;
    c[3] = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// A key is kept iff its 32-bit number reaches this.
MSF_ALWAYS_INLINE inline uint32_t drop_threshold(double p) { return uint32_t(p * 4294967296.0); }

}  // namespace msf
