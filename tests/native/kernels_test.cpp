// The CPU reductions against a model that shares no code with them: elements are decoded to a type
// that is wide enough to round once, combined one by one, and encoded by searching the nearest
// representable value. Every instruction set that runs here is compared, bit by bit.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/errors.h"
#include "cpu/copy.h"
#include "cpu/half.h"
#include "cpu/isa.h"
#include "harness.h"
#include "kernels/cpu/reduce.h"

namespace {

using namespace pycomm;
using namespace pycomm::kernels;

using Bits = uint64_t;               // one element, as in memory
using Elements = std::vector<Bits>;  // the operands of one element of the result, left to right

// ---- the model of 16-bit floats: all magnitudes, ascending ------------------------------------

class HalfModel {
 public:
  // `infinity`: the bits of infinity, with the value of the power of two above the largest finite
  // value: IEEE 754 rounds to it as if it were the next number.
  HalfModel(int mantissa_bits, int bias, unsigned infinity)
      : infinity_(infinity), quiet_(1u << (mantissa_bits - 1)) {
    for (unsigned bits = 0; bits <= infinity; ++bits) {
      const int exponent = static_cast<int>(bits >> mantissa_bits);
      const double mantissa = bits & ((1u << mantissa_bits) - 1);
      const double hidden = exponent > 0 ? std::ldexp(1, mantissa_bits) : 0;
      magnitudes_.push_back(
          std::ldexp(mantissa + hidden, std::max(exponent, 1) - bias - mantissa_bits));
    }
  }
  double decode(Bits bits) const {
    const Bits magnitude = bits & 0x7fff;
    double value = std::numeric_limits<double>::quiet_NaN();
    if (magnitude < infinity_) value = magnitudes_[magnitude];
    if (magnitude == infinity_) value = std::numeric_limits<double>::infinity();
    return bits & 0x8000 ? -value : value;
  }
  Bits encode(double value) const {
    if (std::isnan(value)) return infinity_ | quiet_;
    const double magnitude = std::fabs(value);
    size_t low = 0, high = infinity_;
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (magnitudes_[middle] <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - magnitudes_[low], above = magnitudes_[high] - magnitude;
    const bool up = above < below || (above == below && high % 2 == 0);
    return (up ? high : low) | (std::signbit(value) ? 0x8000 : 0);
  }

 private:
  unsigned infinity_, quiet_;
  std::vector<double> magnitudes_;
};

const HalfModel& half_model(Dtype dtype) {
  static const HalfModel float16{10, 15, 0x7c00}, bfloat16{7, 127, 0x7f80};
  return dtype == Dtype::float16 ? float16 : bfloat16;
}

// ---- the model of an element ------------------------------------------------------------------

#ifdef __x86_64__
using Quad = __float128;
#else
using Quad = long double;  // 113 bits on aarch64
static_assert(std::numeric_limits<Quad>::digits == 113);
#endif

// `Wide` has more than twice the digits of `Float`, so that rounding the wide result is rounding
// once.
template <typename Wide, typename Float>
Float float_step(ReduceOp op, Float a, Float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<Float>::quiet_NaN();
  if (op == ReduceOp::product) return static_cast<Float>(static_cast<Wide>(a) * b);
  if (op != ReduceOp::min && op != ReduceOp::max)
    return static_cast<Float>(static_cast<Wide>(a) + b);
  const bool a_is_less = a == b ? std::signbit(a) && !std::signbit(b) : a < b;
  return a_is_less == (op == ReduceOp::min) ? a : b;
}

template <typename Wide, typename Float>
Float float_model(ReduceOp op, const std::vector<Float>& values, int divisor) {
  Float result = values[0];
  for (size_t i = 1; i < values.size(); ++i) result = float_step<Wide>(op, result, values[i]);
  if (op == ReduceOp::avg) result = static_cast<Float>(static_cast<Wide>(result) / divisor);
  return std::isnan(result) ? std::numeric_limits<Float>::quiet_NaN() : result;
}

Bits integer_step(ReduceOp op, Bits a, Bits b, bool is_less) {
  switch (op) {
    case ReduceOp::sum:
      return a + b;
    case ReduceOp::product:
      return a * b;
    case ReduceOp::min:
      return is_less ? a : b;
    case ReduceOp::max:
      return is_less ? b : a;
    case ReduceOp::band:
      return a & b;
    case ReduceOp::bor:
      return a | b;
    case ReduceOp::bxor:
      return a ^ b;
    case ReduceOp::avg:
      break;
  }
  throw Failure("no model of this op");
}

Bits bool_step(ReduceOp op, bool a, bool b) {
  const int trues = a + b;
  if (op == ReduceOp::bxor) return trues == 1;
  const bool all = op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band;
  return all ? trues == 2 : trues > 0;
}

Bits integer_model(Dtype dtype, ReduceOp op, const Elements& values) {
  const size_t unused = 64 - 8 * bytes_of(dtype);
  const auto widened = [&](Bits bits) { return static_cast<int64_t>(bits << unused) >> unused; };
  Bits result = values[0];
  if (dtype == Dtype::boolean) result = result != 0;
  for (size_t i = 1; i < values.size(); ++i) {
    const Bits next = values[i];
    const bool is_less = dtype == Dtype::uint8 ? result < next : widened(result) < widened(next);
    result = dtype == Dtype::boolean ? bool_step(op, result != 0, next != 0)
                                     : integer_step(op, result, next, is_less);
    result = result << unused >> unused;
  }
  return result;
}

// The operands of one element, combined; `avg` divides by `divisor`.
Bits model(Dtype dtype, ReduceOp op, const Elements& operands, int divisor) {
  if (dtype == Dtype::float64) {
    std::vector<double> values;
    for (const Bits bits : operands) values.push_back(std::bit_cast<double>(bits));
    return std::bit_cast<Bits>(float_model<Quad>(op, values, divisor));
  }
  if (dtype != Dtype::float32 && !is_half(dtype)) return integer_model(dtype, op, operands);
  std::vector<float> values;
  for (const Bits bits : operands)
    values.push_back(is_half(dtype) ? static_cast<float>(half_model(dtype).decode(bits))
                                    : std::bit_cast<float>(static_cast<uint32_t>(bits)));
  const float result = float_model<double>(op, values, divisor);
  return is_half(dtype) ? half_model(dtype).encode(result) : std::bit_cast<uint32_t>(result);
}

// ---- data -------------------------------------------------------------------------------------

// An array between guard bytes, at an address that is odd.
class Guarded {
 public:
  Guarded(Dtype dtype, size_t count)
      : width_(bytes_of(dtype)), bytes_(count * width_ + 2 * kGuard) {
    std::memset(bytes_.data(), 0x5a, bytes_.size());
    shift_ = kGuard - 1 + reinterpret_cast<uintptr_t>(bytes_.data()) % 2;
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(bytes_.data()) + shift_; }
  Bits get(size_t i) const {
    Bits bits = 0;
    std::memcpy(&bits, bytes_.data() + shift_ + i * width_, width_);
    return bits;
  }
  void set(size_t i, Bits bits) { std::memcpy(data() + i * width_, &bits, width_); }
  bool intact() const {
    const size_t end = bytes_.size() - 2 * kGuard + shift_;
    for (size_t i = 0; i < bytes_.size(); ++i)
      if ((i < shift_ || i >= end) && bytes_[i] != 0x5a) return false;
    return true;
  }
  bool operator==(const Guarded& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr size_t kGuard = 64;
  size_t width_, shift_ = 0;
  std::vector<unsigned char> bytes_;
};

// Zeros, ones, infinities, NaN of every kind, the least and the largest; of integers the ends.
const Elements& specials(Dtype dtype) {
  static const Elements halves{0,      0x8000, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01,
                               0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81, 1,      0x8001,
                               0x7bff, 0xfbff, 0x7f7f, 0xff7f, 0x3c00, 0xbc00, 0x3f80,
                               0xbf80, 0x0400, 0x03ff, 0x0080, 0x007f};
  static const Elements float32s{0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                                 0xffc00001, 0x7f800001, 1,          0x80000001, 0x7f7fffff,
                                 0xff7fffff, 0x3f800000, 0xbf800000, 0x00800000};
  static const Elements float64s{0,
                                 1ull << 63,
                                 0x7ff0ull << 48,
                                 0xfff0ull << 48,
                                 0x7ff8ull << 48,
                                 (0xfff8ull << 48) + 1,
                                 (0x7ff0ull << 48) + 1,
                                 1,
                                 (0x7ff0ull << 48) - 1,
                                 (0xfff0ull << 48) - 1,
                                 0x3ff0ull << 48,
                                 0xbff0ull << 48,
                                 0x0010ull << 48};
  static const Elements integers{0,      1,      2,          ~0ull,      0x7f,       0x80,
                                 0x7fff, 0x8000, 0x7fffffff, 0x80000000, ~0ull >> 1, 1ull << 63};
  if (is_half(dtype)) return halves;
  if (dtype == Dtype::float32) return float32s;
  return dtype == Dtype::float64 ? float64s : integers;
}

// A third special, a third any bits, and for floats a third of like size, so that sums round.
Bits random_element(Dtype dtype, std::mt19937_64& random) {
  const Bits any = random();
  const auto kind = random() % 3;
  const double modest = static_cast<double>(any % 2'000'001) / 1e6 - 1;
  if (kind == 0) return specials(dtype)[any % specials(dtype).size()];
  if (kind == 1 && is_half(dtype)) return half_model(dtype).encode(modest);
  if (kind == 1 && dtype == Dtype::float32)
    return std::bit_cast<uint32_t>(static_cast<float>(modest));
  if (kind == 1 && dtype == Dtype::float64) return std::bit_cast<Bits>(modest * 1.1);
  return any;
}

Guarded random_array(Dtype dtype, size_t count, std::mt19937_64& random) {
  Guarded array(dtype, count);
  for (size_t i = 0; i < count; ++i) array.set(i, random_element(dtype, random));
  return array;
}

// ---- the cases --------------------------------------------------------------------------------

struct Case {
  cpu::Isa isa;
  Dtype dtype;
  ReduceOp op;
  std::string name;
};

// Every defined pair, on every instruction set of this machine.
template <typename Body>
void for_each_case(Body body) {
  for (const cpu::Isa isa : cpu::kIsas)
    for (size_t d = 0; cpu::runs_here(isa) && d < kDtypes.size(); ++d)
      for (size_t o = 0; o < kReduceOps.size(); ++o) {
        const Case c{isa, static_cast<Dtype>(d), static_cast<ReduceOp>(o),
                     std::string(kReduceOps[o]) + " of " + std::string(kDtypes[d].name) + ", " +
                         std::string(cpu::kIsaNames[static_cast<size_t>(isa)])};
        if (reducer_for(isa, c.dtype, c.op).reduce != nullptr) body(c);
      }
}

std::string hex(Bits bits) {
  char text[20];
  std::snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(bits));
  return text;
}

void expect_element(const Case& c, size_t i, Bits got, const Elements& operands, Bits wanted) {
  if (got == wanted) return;
  std::string text = c.name + " at " + std::to_string(i) + ":";
  for (const Bits operand : operands) text.append(" ").append(hex(operand));
  expect(false, text + " gave " + hex(got) + ", wanted " + hex(wanted));
}

// size 0 means reduce, any other size finish; `alias`: 0 none, 1 out is a, 2 out is b.
void check_pairs(const Case& c, Guarded a, Guarded b, size_t count, int size, int alias) {
  const Guarded a_before = a, b_before = b;
  Guarded other(c.dtype, count);
  Guarded& out = alias == 0 ? other : alias == 1 ? a : b;
  const Reducer& reducer = reducer_for(c.isa, c.dtype, c.op);
  if (size == 0)
    reducer.reduce(out.data(), a.data(), b.data(), count);
  else
    reducer.finish(out.data(), a.data(), b.data(), count, size);
  for (size_t i = 0; i < count; ++i) {
    const Elements operands{a_before.get(i), b_before.get(i)};
    expect_element(c, i, out.get(i), operands, model(c.dtype, c.op, operands, std::max(size, 1)));
  }
  expect(out.intact(), c.name + ": wrote outside of out");
  expect(alias == 1 || a == a_before, c.name + ": wrote to a");
  expect(alias == 2 || b == b_before, c.name + ": wrote to b");
}

// `alias`: the slot that out is, or -1.
void check_fold(const Case& c, Guarded slots, size_t count, int size, int alias) {
  const Guarded before = slots;
  Guarded other(c.dtype, count);
  const size_t begin = static_cast<size_t>(std::max(alias, 0)) * count;
  Guarded& array = alias < 0 ? other : slots;
  void* out = array.data() + begin * bytes_of(c.dtype);
  reducer_for(c.isa, c.dtype, c.op).fold(out, slots.data(), count, size);
  for (size_t i = 0; i < count; ++i) {
    Elements operands;
    for (int slot = 0; slot < size; ++slot)
      operands.push_back(before.get(static_cast<size_t>(slot) * count + i));
    expect_element(c, i, array.get(begin + i), operands, model(c.dtype, c.op, operands, size));
  }
  for (size_t i = 0; i < count; ++i) slots.set(begin + i, before.get(begin + i));
  expect(slots == before, c.name + ": wrote to another slot");
  expect(array.intact(), c.name + ": wrote outside of out");
}

constexpr size_t kCounts[] = {0, 1, 2, 3, 7, 31, 64, 65, 1000};

const Test kReduce("kernels: reduce and finish, aliased and not", [] {
  std::mt19937_64 random(1);
  for_each_case([&](const Case& c) {
    for (const size_t count : kCounts)
      for (const int alias : {0, 1, 2})
        for (const int size : {0, 2, 3})
          check_pairs(c, random_array(c.dtype, count, random), random_array(c.dtype, count, random),
                      count, size, alias);
  });
});

// The last count is more than one chunk of every dtype.
const Test kFold("kernels: fold, into a slot and elsewhere", [] {
  std::mt19937_64 random(2);
  for_each_case([&](const Case& c) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{65}, size_t{4099}})
      for (const int size : {1, 2, 3, 8})
        for (const int alias : {-1, size - 1}) {
          if (count == 4099 && size > 3) continue;
          check_fold(c, random_array(c.dtype, count * static_cast<size_t>(size), random), count,
                     size, alias);
        }
  });
});

const Test kSpecials("kernels: special values in all pairs; swapped operands give the same bits",
                     [] {
                       for_each_case([](const Case& c) {
                         const Elements& values = specials(c.dtype);
                         const size_t n = values.size();
                         Guarded a(c.dtype, n * n), b(c.dtype, n * n), ab(c.dtype, n * n),
                             ba(c.dtype, n * n);
                         for (size_t i = 0; i < n * n; ++i)
                           a.set(i, values[i / n]), b.set(i, values[i % n]);
                         check_pairs(c, a, b, n * n, 0, 0);
                         const Reducer& reducer = reducer_for(c.isa, c.dtype, c.op);
                         reducer.reduce(ab.data(), a.data(), b.data(), n * n);
                         reducer.reduce(ba.data(), b.data(), a.data(), n * n);
                         for (size_t i = 0; i < n * n; ++i)
                           expect_equal(hex(ba.get(i)), hex(ab.get(i)), c.name + ", swapped");
                       });
                     });

// All 65536, through the loops of each instruction set: a fold of one slot reads and writes.
const Test kRoundTrip("kernels: every 16-bit float survives a round trip", [] {
  for_each_case([](const Case& c) {
    if (!is_half(c.dtype) || c.op != ReduceOp::sum) return;
    Guarded all(c.dtype, 65536);
    for (size_t i = 0; i < 65536; ++i) all.set(i, i);
    check_fold(c, all, 65536, 1, -1);
  });
});

const Test kConversions("kernels: 16-bit conversions are exact and round to nearest even", [] {
  std::mt19937_64 random(3);
  for (const auto dtype : {Dtype::float16, Dtype::bfloat16}) {
    const HalfModel& half = half_model(dtype);
    const auto widen = dtype == Dtype::float16 ? cpu::widen_float16 : cpu::widen_bfloat16;
    const auto narrow = dtype == Dtype::float16 ? cpu::narrow_float16 : cpu::narrow_bfloat16;
    const auto check_narrow = [&](uint32_t bits) {
      const auto value = std::bit_cast<float>(bits);
      expect_equal(hex(narrow(value)), hex(half.encode(value)), "narrow " + hex(bits));
    };
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float wide = widen(static_cast<uint16_t>(bits));
      const double wanted = half.decode(bits);
      if (std::isnan(wanted))
        expect(std::isnan(wide), "widen " + hex(bits));
      else
        expect_equal(hex(std::bit_cast<uint32_t>(wide)),
                     hex(std::bit_cast<uint32_t>(static_cast<float>(wanted))),
                     "widen " + hex(bits));
      // The value, the middle between it and the next one, and the neighbours of both.
      const uint32_t here = std::bit_cast<uint32_t>(wide);
      const uint32_t middle = std::bit_cast<uint32_t>(
          static_cast<float>((half.decode(bits) + half.decode(bits + 1)) / 2));
      for (const uint32_t nearby : {here - 1, here, here + 1, middle - 1, middle, middle + 1})
        check_narrow(nearby);
    }
    for (int i = 0; i < 300'000; ++i) check_narrow(static_cast<uint32_t>(random()));
    for (const Bits bits : specials(Dtype::float32)) check_narrow(static_cast<uint32_t>(bits));
  }
});

const Test kAccumulates("kernels: a fold of 16-bit floats rounds once", [] {
  for_each_case([](const Case& c) {
    if (!is_half(c.dtype) || c.op != ReduceOp::sum) return;
    Guarded slots(c.dtype, 9);  // 1 and eight times a quarter of the last place of 1
    const double place = c.dtype == Dtype::float16 ? 0x1p-10 : 0x1p-7;
    for (size_t i = 0; i < 9; ++i) slots.set(i, half_model(c.dtype).encode(i == 0 ? 1 : place / 4));
    Guarded out(c.dtype, 1);
    reducer_for(c.isa, c.dtype, c.op).fold(out.data(), slots.data(), 1, 9);
    expect_equal(half_model(c.dtype).decode(out.get(0)), 1 + 2 * place, c.name);
  });
});

const Test kRefusals("kernels: an undefined pair is rejected with an explanation", [] {
  int refused = 0;
  for (size_t d = 0; d < kDtypes.size(); ++d)
    for (size_t o = 0; o < kReduceOps.size(); ++o) {
      const auto dtype = static_cast<Dtype>(d);
      const auto op = static_cast<ReduceOp>(o);
      const bool is_float = is_half(dtype) || dtype == Dtype::float32 || dtype == Dtype::float64;
      const bool is_bits = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
      if (is_float ? !is_bits : op != ReduceOp::avg) {
        expect(reducer(dtype, op).fold != nullptr, "a reducer");
        continue;
      }
      ++refused;
      const auto text = expect_throws<Unsupported>([&] { reducer(dtype, op); });
      expect(text.find(kReduceOps[o]) == 0 && text.find(kDtypes[d].name) != text.npos, text);
    }
  expect_equal(refused, 6 + 4 * 3, "pairs refused");
  expect_equal(expect_throws<Unsupported>([] { reducer(Dtype::int32, ReduceOp::avg); }),
               std::string("avg of int32 is not defined: use sum and divide, or a float dtype"),
               "the sentence");
});

const Test kCopies("copies of payload are exact at every size, place and instruction set", [] {
  constexpr size_t kMost = 9000, kEdge = 64;
  std::vector<std::byte> from(kMost + kEdge), into(kMost + 3 * kEdge);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 131 >> 3);
  const std::string before(cpu::kernel_isa());
  for (const cpu::Isa isa : cpu::kIsas) {
    if (!cpu::runs_here(isa)) continue;
    cpu::set_kernel_isa(cpu::kIsaNames[static_cast<size_t>(isa)]);
    for (const size_t bytes : {0, 1, 63, 2047, 2048, 2049, 4096, 8191, 9000})
      for (const size_t source : {0, 1, 17, 63})
        for (const size_t target : {0, 1, 15, 32, 63}) {
          std::ranges::fill(into, std::byte{0xee});
          std::byte* const at = into.data() + kEdge + target;
          cpu::copy(at, from.data() + source, bytes);
          const auto wanted = std::span(from).subspan(source, bytes);
          expect(std::ranges::equal(std::span(at, bytes), wanted), "the bytes");
          const auto is_untouched = [](std::byte x) { return x == std::byte{0xee}; };
          expect(std::all_of(into.data(), at, is_untouched), "bytes in front");
          expect(std::all_of(at + bytes, into.data() + into.size(), is_untouched), "bytes behind");
        }
  }
  cpu::set_kernel_isa(before);
});

}  // namespace
