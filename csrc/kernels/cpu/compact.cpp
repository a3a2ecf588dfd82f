// Compact packets: DeviceKernels on the codec.
#include "codec/compact.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "codec/cpu/indices.h"
#include "core/errors.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/compact_reader.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

using CompactSource = DeviceKernels::CompactSource;

constexpr size_t kSerial = size_t{1} << 15;  // values that do not pay for waking threads
constexpr size_t kPrefetch = 48;             // selected groups

void run_serially(size_t tasks, const std::function<void(size_t)>& task) {
  for (size_t i = 0; i < tasks; ++i) task(i);
}

// Calls code(packet, values before it) for each packet, on several threads if they pay.
template <typename Packet, typename F>
void each_packet(std::span<const Packet> packets, size_t group, F&& code) {
  std::vector<size_t> begins{0};
  for (const Packet& packet : packets) begins.push_back(begins.back() + packet.k * group);
  const auto task = [&](size_t i) { code(i, begins[i]); };
  if (begins.back() >= kSerial && packets.size() > 1)
    return parallel_or_throw(packets.size(), task);
  run_serially(packets.size(), task);
}

// Values and errors in the arrays of the source.
template <typename Real>
class GivenValues final : public codec::BlockValues {
 public:
  explicit GivenValues(const CompactSource& from)
      : values_(static_cast<const Real*>(from.values)), errors_(static_cast<Real*>(from.errors)) {}

  void read(size_t first, std::span<float> values) const override {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(values_[first + i]);
  }
  bool wants_sent() const override { return errors_ != nullptr; }
  void sent(size_t first, std::span<const float>, std::span<float> decoded) const override {
    for (size_t i = 0; i < decoded.size(); ++i)
      errors_[first + i] = cpu::with_one_nan(values_[first + i] - static_cast<Real>(decoded[i]));
  }

 private:
  const Real* values_;
  Real* errors_;
};

template <typename To, typename From>
[[gnu::always_inline]] inline void copy_group(To* to, const From* from, size_t count) {
  constexpr size_t kUsual = 16;  // a copy of constant size is a few instructions
  for (; count >= kUsual; count -= kUsual, to += kUsual, from += kUsual)
    std::memcpy(to, from, kUsual * sizeof(float));
  std::memcpy(to, from, count * sizeof(float));
}

// decoded = own - decoded, or 0 if that is not finite.
struct Errors {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* own, size_t n, float* decoded) {
    for (size_t i = 0; i < n; ++i) {
      const float error = own[i] - decoded[i];
      decoded[i] = cpu::is_finite(error) ? error : 0;
    }
  }
};

// Values in the selected groups of tensors.
class SelectedValues final : public codec::BlockValues {
 public:
  // `firsts`: the first group of each tensor, and the number of groups. The indices ascend in their
  // range.
  SelectedValues(const CompactSource& from, const DeviceKernels::CompactInput& input,
                 std::span<const size_t> firsts)
      : group_(input.group), indices_(from.indices), saved_(static_cast<float*>(from.values)) {
    const std::span indices(from.indices, from.k);
    for (size_t begin = 0; begin < from.k;) {
      const auto above = std::ranges::upper_bound(firsts, static_cast<size_t>(indices[begin]));
      const auto end = static_cast<size_t>(
          std::ranges::lower_bound(indices, static_cast<int64_t>(*above)) - indices.begin());
      const auto tensor = static_cast<size_t>(above - firsts.begin()) - 1;
      tensors_.push_back({&input.tensors[tensor], firsts[tensor], begin, end});
      begin = end;
    }
  }

  void read(size_t first, std::span<float> values) const override {
    each(first, values.size(), [&](const float* at, size_t i, size_t n) {
      copy_group(values.data() + i, at, n);
      std::fill_n(values.data() + i + n, group_ - n, 0.0f);
    });
    std::ranges::copy(values, saved_ + first);
  }
  void sent(size_t first, std::span<const float> own, std::span<float> decoded) const override {
    cpu::run_on<Errors, const float*>(cpu::isa_here(), own.data(), own.size(), decoded.data());
    each(first, own.size(),
         [&](float* at, size_t i, size_t n) { copy_group(at, decoded.data() + i, n); });
  }

 private:
  // A tensor with selected groups.
  struct Tensor {
    const Array* array;
    size_t first_group;
    size_t begin, end;  // its part of the selection
  };

  // Calls f(address, i, n) for each group from value `first` on: n neighbours, the values from
  // first + i on.
  template <typename F>
  [[gnu::always_inline]] void each(size_t first, size_t count, F&& f) const {
    size_t at = first / group_;
    const Tensor* tensor = &*(std::ranges::upper_bound(tensors_, at, {}, &Tensor::begin) - 1);
    for (size_t i = 0; i < count; i += group_, ++at) {
      if (at == tensor->end) ++tensor;
      auto* const data = static_cast<float*>(tensor->array->data);
      const size_t begin = begin_of(*tensor, at);
      if (at + kPrefetch < tensor->end) {
        const float* const ahead = data + begin_of(*tensor, at + kPrefetch);
        __builtin_prefetch(ahead, 1);
        __builtin_prefetch(ahead + group_ - 1, 1);  // often in the next cache line
      }
      f(data + begin, i, std::min(group_, tensor->array->count - begin));
    }
  }
  size_t begin_of(const Tensor& tensor, size_t at) const {
    return (static_cast<size_t>(indices_[at]) - tensor.first_group) * group_;
  }

  size_t group_;
  const int32_t* indices_;
  float* saved_;
  std::vector<Tensor> tensors_;
};

std::vector<size_t> first_groups(std::span<const Array> tensors, size_t group) {
  std::vector<size_t> firsts{0};
  for (const Array& tensor : tensors)
    firsts.push_back(firsts.back() + groups_in(tensor.count, group));
  return firsts;
}

// The indices as the packet has them; `buffer` is used if those of the source differ.
std::span<const int32_t> indices_of(const CompactSource& from, std::vector<int32_t>& buffer) {
  const std::span indices(from.indices, from.k);
  if (from.first == 0) return indices;
  buffer.resize(from.k);
  std::ranges::transform(indices, buffer.begin(), [&](int32_t index) {
    return static_cast<int32_t>(static_cast<uint32_t>(index) - static_cast<uint32_t>(from.first));
  });
  return buffer;
}

}  // namespace

void CpuKernels::encode_compact(std::span<const CompactSource> sources, const CompactInput& input,
                                const CompactSizes& to, Queue) {
  const std::vector<size_t> firsts = first_groups(input.tensors, input.group);
  const codec::RunTasks run = [&](size_t tasks, const auto& task) {
    if (sources.size() > 1 || sources[0].k * input.group < kSerial)
      run_serially(tasks, task);
    else
      parallel(tasks, task);
  };
  each_packet(sources, input.group, [&](size_t i, size_t) {
    const CompactSource& from = sources[i];
    std::vector<int32_t> buffer;
    const codec::CompactGroups groups{indices_of(from, buffer), from.count, input.group};
    codec::check_indices(groups.indices, groups.count);
    const auto write = [&](const codec::BlockValues& values) {
      to.sizes[i] = codec::encode_compact(groups, input.codes, values, from.out, run);
    };
    if (!input.tensors.empty()) return write(SelectedValues(from, input, firsts));
    visit_real(input.codes.dtype,
               [&](auto dtype) { write(GivenValues<cpu::Stored<dtype()>>(from)); });
  });
}

void CpuKernels::decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                                Queue) {
  each_packet(packets, to.group, [&](size_t i, size_t begin) {
    const CompactPacket& packet = packets[i];
    const codec::PacketReader reader = reader_of(packet, to.group);
    const size_t count = packet.k * to.group;
    int32_t* const elements = to.indices + begin;
    int32_t* const groups = elements + (count - packet.k);  // the last ones, each read before its
    reader.read_indices(groups);                            // place is written
    const cpu::ExactFloats exact;
    reader.read_values(0, {to.values + begin, count});
    for (size_t slot = 0; slot < packet.k; ++slot) {
      const size_t group = packet.first + static_cast<size_t>(groups[slot]);
      expand_group(group, to.group, elements + slot * to.group);
    }
    to.refused[i] = 0;
  });
}

size_t CpuKernels::compact_encoding_bytes(std::span<const CompactSource>, const CompactInput&) {
  return 0;
}
size_t CpuKernels::compact_decoding_bytes(std::span<const CompactPacket>, size_t) { return 0; }

}  // namespace pycomm::kernels
