// The constants of a compact packet, the size of each part, and its header: the layout of compact.h
// as functions, for every implementation of DeviceKernels.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycomm::codec {

inline constexpr std::array<char, 3> kCompactMagic{'P', 'L', 1};

enum class IndexCode : uint8_t { list, bitmap, rice };
enum class ValueCode : uint8_t { float32, bfloat16, two_bit, one_bit, three_bit };
inline constexpr std::array<std::string_view, 3> kIndexCodes{"list", "bitmap", "rice"};
inline constexpr std::array<std::string_view, 5> kValueCodes{"float32", "bfloat16", "2bit", "1bit",
                                                             "3bit"};

inline constexpr size_t kValueBlock = 4096;  // values that share levels
inline constexpr int kReach = 8 * 128;       // 3bit: eight octaves, in steps of bfloat16
inline constexpr size_t kRiceBlock = 64;     // gaps that share a parameter
inline constexpr int kMostParameter = 30;    // the quotient of a gap below 2^31 - 1 is then 0 or 1
inline constexpr size_t kMostVarint = 5;     // bytes of a varint below 2^31
inline constexpr size_t kMostHead = kCompactMagic.size() + 2 + 2 * kMostVarint;
inline constexpr size_t kMostGroup = 1024;  // elements
static_assert(kValueBlock % kMostGroup == 0);

// The integer part of log2(ln 2 * count / k), or 0: near the parameter of k equal gaps.
constexpr int rice_start(size_t k, size_t count) {
  const uint64_t scaled = (uint64_t{count} * 45426 / k) >> 16;  // ln 2 = 45426 / 65536
  return scaled == 0 ? 0 : static_cast<int>(std::bit_width(scaled)) - 1;
}

constexpr size_t bytes_of_bits(uint64_t bits) { return (bits + 7) / 8; }
constexpr size_t bitmap_bytes(size_t count) { return bytes_of_bits(count); }

// Bits per packed value, so the last byte may have padding; 0: not packed.
constexpr size_t packed_bits(ValueCode code) {
  switch (code) {
    case ValueCode::float32:
    case ValueCode::bfloat16:
      return 0;
    case ValueCode::two_bit:
      return 2;
    case ValueCode::one_bit:
      return 1;
    case ValueCode::three_bit:
      return 3;
  }
  return 0;
}

// Bytes of the levels of a block, and of the whole block, for a code of 1, 2, 3, 4 or 8 bits.
constexpr size_t level_bytes(unsigned bits) { return bits == 1 ? 2 : 4; }
constexpr size_t level_block_bytes(unsigned bits, size_t count) {
  return level_bytes(bits) + bytes_of_bits(count * bits);
}

// For `count` values of one block.
constexpr size_t value_block_bytes(ValueCode code, size_t count) {
  switch (code) {
    case ValueCode::float32:
      return 4 * count;
    case ValueCode::bfloat16:
      return 2 * count;
    case ValueCode::two_bit:
    case ValueCode::one_bit:
    case ValueCode::three_bit:
      return level_block_bytes(static_cast<unsigned>(packed_bits(code)), count);
  }
  return 0;
}

// For `count` values; only the last block may be shorter.
constexpr size_t value_bytes(ValueCode code, size_t count) {
  const size_t rest = count % kValueBlock;
  return count / kValueBlock * value_block_bytes(code, kValueBlock) +
         (rest > 0 ? value_block_bytes(code, rest) : 0);
}

// Minimum and maximum size of k indices of `count`.
constexpr size_t least_index_bytes(IndexCode code, size_t k, size_t count) {
  if (k == count) return 0;
  switch (code) {
    case IndexCode::list:
      return 4 * k;
    case IndexCode::bitmap:
      return bitmap_bytes(count);
    case IndexCode::rice:
      return k / 8;
  }
  return 0;
}
constexpr size_t most_index_bytes(IndexCode code, size_t k, size_t count) {
  if (k == count) return 0;
  // A gap takes a remainder of 30 bits, a one, and at most 2 zeros on average by the choice of
  // parameters.
  if (code == IndexCode::rice) return (k * 33 + (k / kRiceBlock + 1) * 61) / 8 + 2;
  return least_index_bytes(code, k, count);
}

struct CompactHead {
  std::array<std::byte, kMostHead> bytes{};
  size_t size = 0;
};

constexpr CompactHead compact_head(size_t k, size_t count, size_t group, IndexCode index_code,
                                   ValueCode value_code) {
  CompactHead head;
  const auto put = [&](size_t byte) {
    head.bytes[head.size++] = static_cast<std::byte>(byte & 0xff);
  };
  for (const char letter : kCompactMagic) put(static_cast<unsigned char>(letter));
  put(static_cast<size_t>(index_code) | static_cast<size_t>(value_code) << 4);
  put(static_cast<size_t>(std::countr_zero(group)));
  for (size_t number : {k, count}) {
    for (; number >= 0x80; number >>= 7) put((number & 0x7f) | 0x80);
    put(number);
  }
  return head;
}

}  // namespace pycomm::codec
