// Compact packets: round trips on every instruction set, the size bound, and truncated packets.
// Buffers have the exact length, so that the address sanitizer sees each access outside. The format
// is tested by tests/unit/test_compact.py, any bytes by tests/fuzz/packets_fuzz.cpp.
#include "codec/compact.h"

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "harness.h"

namespace {

using namespace pycomm;
using namespace pycomm::codec;

using Random = std::mt19937_64;
using Bytes = std::vector<std::byte>;

struct Set {
  size_t count;
  std::vector<int32_t> indices;
};

// Each gap below `limit`, but for one in `run` that is up to `jump` times that.
Set set_of(size_t k, uint64_t limit, uint64_t run, uint64_t jump, Random& random) {
  Set set{0, {}};
  for (size_t i = 0; i < k; ++i) {
    const uint64_t gap = random() % limit * (random() % run == 0 ? random() % jump + 1 : 1);
    if (set.count + gap >= 0x7ffffffe) break;
    set.indices.push_back(static_cast<int32_t>(set.count + gap));
    set.count += gap + 1;
  }
  set.count += std::min<uint64_t>(random() % limit, 0x7fffffff - set.count);
  return set;
}

std::vector<Set> sets(Random& random) {
  std::vector<Set> all{{0, {}},
                       {0x7fffffff, {}},
                       {0x7fffffff, {0x7ffffffe}},
                       {0x7fffffff, {0, 0x7ffffffe}},
                       {1, {0}}};
  for (const size_t k : {1, 63, 64, 65, 200, 4097})
    for (const uint64_t limit : {1, 2, 5, 100, 5000})
      all.push_back(set_of(k, limit, 60, limit, random));
  return all;
}

// The memory ends where the bytes end.
std::unique_ptr<std::byte[]> alone(const Bytes& bytes) {
  auto copy = std::make_unique<std::byte[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.get());
  return copy;
}

class Given final : public BlockValues {
 public:
  explicit Given(const std::vector<float>& all) : all_(all) {}
  void read(size_t first, std::span<float> values) const override {
    std::copy_n(&all_[first], values.size(), values.begin());
  }
  bool wants_sent() const override { return false; }
  void sent(size_t, std::span<const float>, std::span<float>) const override {}

 private:
  const std::vector<float>& all_;
};

Bytes encoded(const Set& set, const std::vector<float>& values, const CompactCodes& how) {
  const size_t k = set.indices.size(), most = most_compact_bytes(k, set.count, 1, how);
  const auto room = std::make_unique<std::byte[]>(most);
  const auto run = [](size_t tasks, const auto& task) {
    for (size_t i = 0; i < tasks; ++i) task(i);
  };
  const size_t used = encode_compact({set.indices, set.count}, how, Given(values), room.get(), run);
  expect(used <= most, "more bytes than the bound");
  return {room.get(), room.get() + used};
}

struct Pairs {
  std::vector<int32_t> indices;
  std::vector<float> values;
};

Pairs decoded(const Bytes& bytes) {
  const auto copy = alone(bytes);
  const std::span found(copy.get(), bytes.size());
  const size_t k = read_compact_header(found).k;
  Pairs pairs{std::vector<int32_t>(k), std::vector<float>(k)};
  const PacketReader reader(found);
  const cpu::ExactFloats exact;
  reader.read_indices(pairs.indices.data());
  reader.read_values(0, pairs.values);
  return pairs;
}

std::vector<float> random_values(size_t k, Random& random) {
  std::vector<float> values(k);
  for (float& value : values) value = static_cast<float>(random() % 2001) / 1000 - 1;
  return values;
}

// f(codes) for each pair of codes that the set can have without taking all memory.
template <typename F>
void each_code(const Set& set, F&& f) {
  for (const auto index_code : {IndexCode::list, IndexCode::bitmap, IndexCode::rice})
    for (size_t v = 0; v < kValueCodes.size(); ++v)
      if (index_code != IndexCode::bitmap || set.count < 10'000'000)
        f(CompactCodes{Dtype::float32, false, index_code, static_cast<ValueCode>(v)});
}

// Encoded and decoded on the instruction set of this name; nothing where it does not run.
const Test kRoundTrip(
    "compact: a round trip gives the same bytes and values on every instruction set", [] {
      Random random(1);
      const std::string best(cpu::kernel_isa());
      for (const Set& set : sets(random)) {
        const auto values = random_values(set.indices.size(), random);
        each_code(set, [&](const CompactCodes& how) {
          cpu::set_kernel_isa("baseline");
          const Bytes plain = encoded(set, values, how);
          const Pairs there = decoded(plain);
          cpu::set_kernel_isa(best);
          expect(encoded(set, values, how) == plain, best + " writes other bytes");
          const Pairs here = decoded(plain);
          expect(here.indices == set.indices && there.indices == set.indices, "other indices");
          expect(here.values == there.values, best + " reads other values");
          if (how.value_code == ValueCode::float32) expect(here.values == values, "other values");
        });
      }
    });

// Decodes arbitrary bytes; returns whether they were a packet.
bool survives(const Bytes& bytes) {
  try {
    const Pairs pairs = decoded(bytes);
    const size_t count = read_compact_header(bytes).count;
    for (size_t i = 0; i < pairs.indices.size(); ++i)
      expect(pairs.indices[i] > (i == 0 ? -1 : pairs.indices[i - 1]) &&
                 static_cast<size_t>(pairs.indices[i]) < count,
             "indices that do not ascend in their array were accepted");
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

const Test kTruncated("compact: a truncated packet is refused, and one with trailing bytes", [] {
  Random random(3);
  for (const size_t k : {0, 1, 5, 70, 200})
    for (const uint64_t limit : {1, 30, 40'000}) {
      const Set set = set_of(k, limit, 20, 20, random);
      const auto values = random_values(set.indices.size(), random);
      each_code(set, [&](const CompactCodes& how) {
        Bytes bytes = encoded(set, values, how);
        expect(survives(bytes), "a packet was refused");
        for (size_t n = 0; n < bytes.size(); n += 1 + bytes.size() / 50 + random() % 3)
          expect(!survives({bytes.begin(), bytes.begin() + n}), "a truncated packet was accepted");
        bytes.push_back(std::byte{0});
        expect(!survives(bytes), "a trailing byte was accepted");
      });
    }
});

}  // namespace
