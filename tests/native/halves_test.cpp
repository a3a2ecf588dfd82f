// Reductions of float16 and bfloat16 on every instruction set that runs here, bit by bit, against
// the conversions of one element, which the suite "kernels" compares with a model.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/arithmetic.h"
#include "cpu/isa.h"
#include "harness.h"
#include "kernels/cpu/reduce.h"

namespace {

using namespace pycomm;

constexpr size_t kValues = 65536;
constexpr int kDivisor = 3;
using Halves = std::vector<uint16_t>;

const Halves& all_values() {
  static const Halves values = [] {
    Halves all(kValues);
    std::iota(all.begin(), all.end(), uint16_t{0});
    return all;
  }();
  return values;
}

// The other operands of all values: zeros, ones, infinities, NaN, the ends of the subnormals, the
// largest values, halves of the last place of 1; then all values in random orders.
std::vector<Halves> partners() {
  std::vector<Halves> found;
  for (const uint16_t value :
       {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x03ff, 0x0400, 0x3c00, 0xbc00,
        0x3f80, 0xbf80, 0x3b80, 0x1000, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0x7e00,
        0xfe01, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0x7fc0, 0xffc1})
    found.emplace_back(kValues, value);
  std::mt19937 random(4);
  for (int i = 0; i < 8; ++i) std::ranges::shuffle(found.emplace_back(all_values()), random);
  return found;
}

std::string hex(unsigned bits) {
  char text[12];
  std::snprintf(text, sizeof text, "%04x", bits);
  return text;
}

std::string name_of(cpu::Isa isa) { return std::string(cpu::kIsaNames[static_cast<size_t>(isa)]); }

template <typename Body>
void for_each_isa(Body body) {
  for (const cpu::Isa isa : cpu::kIsas)
    if (cpu::runs_here(isa)) body(isa);
}

// Calls body<dtype, op>() for both dtypes and every op of floats.
template <typename Body>
void for_each_pair(Body body) {
  const auto each_op = [&]<Dtype kDtype> {
    body.template operator()<kDtype, ReduceOp::sum>();
    body.template operator()<kDtype, ReduceOp::avg>();
    body.template operator()<kDtype, ReduceOp::product>();
    body.template operator()<kDtype, ReduceOp::min>();
    body.template operator()<kDtype, ReduceOp::max>();
  };
  each_op.template operator()<Dtype::float16>();
  each_op.template operator()<Dtype::bfloat16>();
}

template <Dtype kDtype, ReduceOp kOp>
void check_pairs(const Halves& a, const Halves& b) {
  Halves wanted(kValues), got(kValues);
  for (size_t i = 0; i < kValues; ++i) {
    const float value = cpu::combine<kOp>(cpu::load<kDtype>(a.data(), i),  //
                                          cpu::load<kDtype>(b.data(), i));
    cpu::store<kDtype>(wanted.data(), i, cpu::last<kOp>(value, kDivisor));
  }
  for_each_isa([&](cpu::Isa isa) {
    const kernels::Reducer& reducer = kernels::reducer_for(isa, kDtype, kOp);
    reducer.finish(got.data(), a.data(), b.data(), kValues, kDivisor);
    const auto [at, other] = std::ranges::mismatch(got, wanted);
    if (at == got.end()) return;
    const auto i = static_cast<size_t>(at - got.begin());
    expect(false, std::string(kReduceOps[static_cast<size_t>(kOp)]) + " of " +
                      std::string(name_of(kDtype)) + ", " + name_of(isa) + ": " + hex(a[i]) +
                      " and " + hex(b[i]) + " gave " + hex(*at) + ", wanted " + hex(*other));
  });
}

const Test kPairs("halves: every value has the same results on all instruction sets", [] {
  for (const Halves& b : partners())
    for_each_pair([&]<Dtype kDtype, ReduceOp kOp> { check_pairs<kDtype, kOp>(all_values(), b); });
});

// One vector and its rest: each count below two vectors, in place.
const Test kRests("halves: a rest of any length is reduced, and nothing behind it", [] {
  std::mt19937 random(5);
  Halves a(all_values()), b(all_values());
  std::ranges::shuffle(a, random);
  std::ranges::shuffle(b, random);
  for_each_pair([&]<Dtype kDtype, ReduceOp kOp> {
    for_each_isa([&](cpu::Isa isa) {
      const kernels::Reducer& reducer = kernels::reducer_for(isa, kDtype, kOp);
      Halves whole(128);
      const void* const slots[] = {a.data(), b.data(), a.data() + 500};
      reducer.join(whole.data(), slots, whole.size(), 3);
      for (size_t count = 0; count < whole.size(); ++count) {
        Halves first(a.begin(), a.begin() + 128);
        const void* const own_slots[] = {first.data(), slots[1], slots[2]};
        reducer.join(first.data(), own_slots, count, 3);
        const auto end = static_cast<ptrdiff_t>(count);
        expect(std::equal(first.begin(), first.begin() + end, whole.begin()),
               name_of(isa) + ": " + std::to_string(count) + " elements");
        expect(std::equal(first.begin() + end, first.end(), a.begin() + end),
               name_of(isa) + ": wrote behind " + std::to_string(count) + " elements");
      }
    });
  });
});

}  // namespace
