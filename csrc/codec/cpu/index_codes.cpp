// The index codes: sizes, encoders and decoders. The Rice code is written in two passes, the first
// of which finds the parameters; both process blocks in registers and the L1 cache.
#include "codec/cpu/index_codes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "codec/cpu/bits.h"
#include "codec/cpu/indices.h"
#include "core/errors.h"
#include "cpu/isa.h"

namespace pycomm::codec {
namespace {

constexpr size_t kBlock = kPacked;

[[noreturn]] void refuse(const char* why) {
  throw InvalidArgument(std::string("invalid packet: ") + why);
}

// The gaps of one block, padded with gaps that take no bits.
struct Gaps {
  std::array<uint32_t, kBlock> gap;

  [[gnu::always_inline]] void read(const int32_t* indices, size_t first, size_t n) {
    const auto at = [&](size_t i) { return static_cast<uint32_t>(indices[first + i]); };
    gap[0] = first == 0 ? at(0) : at(0) - at(size_t{0} - 1) - 1;
    for (size_t i = 1; i < n; ++i) gap[i] = at(i) - at(i - 1) - 1;
    for (size_t i = n; i < kBlock; ++i) gap[i] = 0;
  }
  // The sum of (gap / 2^b + 1) / 2, exact up to 2^20.
  [[gnu::always_inline]] uint32_t halves(int b) const {
    uint32_t sum = 0;
    for (const uint32_t g : gap) sum += std::min(((g >> b) + 1) >> 1, uint32_t{1} << 20);
    return sum;
  }
  [[gnu::always_inline]] uint32_t quotients(int b) const {
    uint32_t sum = 0;
    for (const uint32_t g : gap) sum += g >> b;
    return sum;
  }
};

[[gnu::always_inline]] inline uint64_t zigzag(int difference) {
  return static_cast<uint64_t>(difference > 0 ? 2 * difference - 1 : -2 * difference);
}

// The search starts at the previous parameter: the number of bits is convex in b.
struct FindParameters {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(std::span<const int32_t> indices, int b, RicePlan* plan) {
    Gaps gaps;
    for (size_t first = 0; first < indices.size(); first += kBlock) {
      const size_t n = std::min(kBlock, indices.size() - first);
      gaps.read(indices.data(), first, n);
      const int before = b;
      while (gaps.halves(b) > n) ++b;
      if (b == before)
        while (b > 0 && gaps.halves(b - 1) <= n) --b;
      plan->parameters[first / kBlock] = static_cast<uint8_t>(b);
      plan->unary_bits += zigzag(b - before) + 1 + gaps.quotients(b) + n;
      plan->remainder_bits += n * static_cast<size_t>(b);
    }
  }
};

// Writes the quotients to `quotients` and the remainders to `out`; returns the position of the next
// byte there.
struct WriteGaps {
  template <cpu::Isa>
  [[gnu::always_inline]] static std::byte* run(std::span<const int32_t> indices,
                                               const uint8_t* parameters, UnaryWriter* quotients,
                                               std::byte* out) {
    UnaryWriter unary = *quotients;  // in registers
    Gaps gaps;
    std::array<uint32_t, kBlock> low;
    for (size_t first = 0; first < indices.size(); first += kBlock) {
      const size_t n = std::min(kBlock, indices.size() - first);
      const unsigned b = parameters[first / kBlock];
      const uint32_t mask = (uint32_t{1} << b) - 1;
      gaps.read(indices.data(), first, n);
      for (size_t i = 0; i < kBlock; ++i) low[i] = gaps.gap[i] & mask;
      for (size_t i = 0; i < n; ++i) unary.put(gaps.gap[i] >> b);
      out = write_remainders(low, n, b, out);
    }
    *quotients = unary;
    return out;
  }

 private:
  static std::byte* write_remainders(const std::array<uint32_t, kBlock>& low, size_t n, unsigned b,
                                     std::byte* out) {
    const size_t bytes = bytes_of_bits(n * b);
    if (n == kBlock) {
      Packings::kPack[b](low.data(), out);
    } else {
      std::array<std::byte, kBlock * kMostWidth / 8> last;
      Packings::kPack[b](low.data(), last.data());
      std::copy_n(last.begin(), bytes, out);
    }
    return out + bytes;
  }
};

struct ReadGaps {
  // Returns the bit after the last quotient, or 0 if data is missing or out of range. `ones` is
  // past the parameters, which end before bit `end`. `low` has as many bytes as the parameters
  // require.
  template <cpu::Isa>
  [[gnu::always_inline]] static uint64_t run(std::span<int32_t> indices, size_t count,
                                             const uint8_t* parameters, OnesReader* quotients,
                                             const std::byte* low, uint64_t end) {
    OnesReader ones = *quotients;  // in registers
    std::array<uint32_t, kBlock> remainders;
    uint64_t next = 0;
    for (size_t first = 0; first < indices.size(); first += kBlock) {
      const size_t n = std::min(kBlock, indices.size() - first);
      const unsigned b = parameters[first / kBlock];
      const uint64_t begin = end;
      low = read_remainders(low, n, b, remainders);
      for (size_t i = 0; i < n; ++i) {
        const uint64_t one = ones.next();
        next += ((one - end) << b) + remainders[i] + 1;
        indices[first + i] = static_cast<int32_t>(next - 1);
        end = one + 1;
      }
      // The quotients of a block sum to at most 2n, by the choice of b, so no sum has wrapped.
      if (end - begin > 3 * n || next > count) return 0;
    }
    *quotients = ones;
    return end;
  }

 private:
  static const std::byte* read_remainders(const std::byte* low, size_t n, unsigned b,
                                          std::array<uint32_t, kBlock>& remainders) {
    const size_t bytes = bytes_of_bits(n * b);
    if (n == kBlock) {
      Packings::kUnpack[b](low, remainders.data());
    } else {
      std::array<std::byte, kBlock * kMostWidth / 8> last{};
      std::copy_n(low, bytes, last.begin());
      Packings::kUnpack[b](last.data(), remainders.data());
    }
    return low + bytes;
  }
};

// Reads the parameters of k indices; returns the bit after them.
uint64_t read_parameters(OnesReader& ones, int b, std::span<uint8_t> parameters) {
  uint64_t end = 0;
  for (uint8_t& parameter : parameters) {
    const uint64_t one = ones.next(), number = one - end;
    if (number > 2 * kMostParameter) refuse("a Rice parameter of its indices is out of range");
    b += number % 2 == 1 ? static_cast<int>(number + 1) / 2 : -static_cast<int>(number / 2);
    if (b < 0 || b > kMostParameter) refuse("a Rice parameter of its indices is out of range");
    parameter = static_cast<uint8_t>(b);
    end = one + 1;
  }
  return end;
}

// Whether the bits of the last byte after the first `bits` are zero.
bool zeros_behind(std::span<const std::byte> bytes, uint64_t bits) {
  return bits % 8 == 0 || std::to_integer<unsigned>(bytes[bits / 8]) >> bits % 8 == 0;
}

void read_rice(std::span<const std::byte> bytes, size_t count, std::span<int32_t> indices) {
  if (indices.empty()) {
    if (!bytes.empty()) refuse("the length of its indices is invalid");
    return;
  }
  std::vector<uint8_t> parameters((indices.size() + kBlock - 1) / kBlock);
  // Each parameter takes at least a bit, so the allocation is bounded by the size of the packet.
  OnesReader all(bytes);
  uint64_t end = read_parameters(all, rice_start(indices.size(), count), parameters);
  uint64_t remainder_bits = 0;
  for (size_t block = 0; block < parameters.size(); ++block)
    remainder_bits += parameters[block] * std::min(kBlock, indices.size() - block * kBlock);
  const size_t remainder_bytes = bytes_of_bits(remainder_bits);
  if (remainder_bytes > bytes.size()) refuse("the length of its indices is invalid");
  const auto unary = bytes.first(bytes.size() - remainder_bytes);
  const auto low = bytes.last(remainder_bytes);
  OnesReader ones(unary);
  ones.skip(end);
  end = cpu::run_on<ReadGaps>(cpu::isa_here(), indices, count, parameters.data(), &ones, low.data(),
                              end);
  if (end == 0) refuse("an index is out of range");
  if (bytes_of_bits(end) != unary.size() || ones.next() != OnesReader::kNone ||
      !zeros_behind(low, remainder_bits))
    refuse("the length of its indices is invalid");
}

void read_bitmap(std::span<const std::byte> bytes, size_t count, std::span<int32_t> indices) {
  if (bytes.size() != bitmap_bytes(count)) refuse("the length of its indices is invalid");
  OnesReader ones(bytes);
  uint64_t last = 0;
  for (int32_t& index : indices) {
    last = ones.next();
    index = static_cast<int32_t>(last);
    if (last >= count) break;
  }
  if ((!indices.empty() && last >= count) || ones.next() != OnesReader::kNone)
    refuse("the number of ones in its bitmap is not k");
}

size_t rice_bytes(const RicePlan& plan) {
  return bytes_of_bits(plan.unary_bits) + bytes_of_bits(plan.remainder_bits);
}

RicePlan plan_rice(std::span<const int32_t> indices, size_t count) {
  RicePlan plan;
  if (indices.empty()) return plan;
  plan.parameters.resize((indices.size() + kBlock - 1) / kBlock);
  cpu::run_on<FindParameters>(cpu::isa_here(), indices, rice_start(indices.size(), count), &plan);
  return plan;
}

std::byte* write_list(std::span<const int32_t> indices, std::byte* out) {
  if (!indices.empty()) std::memcpy(out, indices.data(), indices.size_bytes());
  return out + indices.size_bytes();
}

std::byte* write_bitmap(std::span<const int32_t> indices, size_t count, std::byte* out) {
  std::byte* const end = out + bitmap_bytes(count);
  UnaryWriter ones(out);
  int64_t before = -1;
  for (const int32_t index : indices) {
    ones.put(static_cast<uint64_t>(index - before - 1));
    before = index;
  }
  std::fill(ones.finish(), end, std::byte{0});
  return end;
}

std::byte* write_rice(std::span<const int32_t> indices, size_t count, const RicePlan& plan,
                      std::byte* out) {
  if (indices.empty()) return out;
  UnaryWriter unary(out);
  int before = rice_start(indices.size(), count);
  for (const uint8_t b : plan.parameters) {
    unary.put(zigzag(b - before));
    before = b;
  }
  std::byte* const end = cpu::run_on<WriteGaps>(cpu::isa_here(), indices, plan.parameters.data(),
                                                &unary, out + bytes_of_bits(plan.unary_bits));
  unary.finish();
  return end;
}

}  // namespace

IndexPlan plan_indices(std::span<const int32_t> indices, size_t count,
                       std::optional<IndexCode> fixed) {
  IndexPlan plan{fixed.value_or(IndexCode::rice), {}};
  if (plan.code == IndexCode::rice) plan.rice = plan_rice(indices, count);
  if (!fixed) {
    const std::array bytes{indices.size_bytes(), bitmap_bytes(count), rice_bytes(plan.rice)};
    plan.code =
        static_cast<IndexCode>(std::min_element(bytes.begin(), bytes.end()) - bytes.begin());
  }
  return plan;
}

std::byte* write_indices(std::span<const int32_t> indices, size_t count, const IndexPlan& plan,
                         std::byte* out) {
  switch (plan.code) {
    case IndexCode::list:
      return write_list(indices, out);
    case IndexCode::bitmap:
      return write_bitmap(indices, count, out);
    case IndexCode::rice:
      return write_rice(indices, count, plan.rice, out);
  }
  return out;
}

void read_indices(IndexCode code, std::span<const std::byte> bytes, size_t count,
                  std::span<int32_t> indices) {
  switch (code) {
    case IndexCode::list:
      if (bytes.size() != indices.size_bytes()) refuse("the length of its indices is invalid");
      if (!indices.empty()) std::memcpy(indices.data(), bytes.data(), bytes.size());
      return check_indices(indices, count);
    case IndexCode::bitmap:
      return read_bitmap(bytes, count, indices);
    case IndexCode::rice:
      return read_rice(bytes, count, indices);
  }
}

}  // namespace pycomm::codec
