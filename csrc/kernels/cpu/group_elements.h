// The elements of groups, and packets of groups as the CPU reads them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "codec/groups.h"
#include "core/errors.h"
#include "kernels/groups.h"

namespace pycomm::kernels {

// The elements of groups of tensors with these counts. Elements count through all tensors.
class GroupElements {
 public:
  GroupElements(std::span<const uint64_t> counts, size_t group) : group_(group) {
    size_t first = 0;
    for (const size_t count : counts) {
      tensors_.push_back({groups_, first, first + count});
      groups_ += groups_in(count, group);
      first += count;
    }
  }

  size_t groups() const { return groups_; }

  // Calls f(group, how many elements it lacks) for the shorter groups.
  template <typename F>
  void each_short(F&& f) const {
    for (const Tensor& tensor : tensors_) {
      const size_t count = tensor.end - tensor.begin, groups = groups_in(count, group_);
      if (count % group_ != 0) f(tensor.groups + groups - 1, groups * group_ - count);
    }
  }
  size_t group() const { return group_; }

  // The group of an element, or the number of groups for the number of elements.
  size_t group_of(size_t element) const {
    const Tensor& tensor =
        *(std::upper_bound(tensors_.begin(), tensors_.end(), element,
                           [](size_t at, const Tensor& b) { return at < b.begin; }) -
          1);
    return tensor.groups + groups_in(std::min(element, tensor.end) - tensor.begin, group_);
  }

  // The number of elements in groups whose indices ascend in their range; with `elements` not null
  // also these elements.
  size_t of(std::span<const int32_t> indices, int32_t* elements) const {
    if (indices.empty()) return 0;
    auto tensor = std::upper_bound(tensors_.begin(), tensors_.end(), index_of(indices[0]),
                                   [](size_t index, const Tensor& b) { return index < b.groups; }) -
                  1;
    size_t found = 0;
    for (const int32_t each : indices) {
      const size_t index = index_of(each);
      while (tensor + 1 != tensors_.end() && index >= tensor[1].groups) ++tensor;
      const size_t begin = tensor->begin + (index - tensor->groups) * group_;
      const size_t count = std::min(group_, tensor->end - begin);
      if (elements != nullptr)
        std::iota(elements + found, elements + found + count, static_cast<int32_t>(begin));
      found += count;
    }
    return found;
  }

 private:
  struct Tensor {
    size_t groups;  // of the tensors before it
    size_t begin, end;
  };

  static size_t index_of(int32_t index) { return static_cast<size_t>(index); }

  size_t group_, groups_ = 0;
  std::vector<Tensor> tensors_;
};

// Where the values of selected groups are in a packet.
class ValuePlaces {
 public:
  // `indices` ascend in their range.
  ValuePlaces(const GroupElements& all, std::span<const int32_t> indices) : group_(all.group()) {
    size_t lacking = 0;
    all.each_short([&](size_t short_group, size_t lack) {
      const auto found = std::ranges::lower_bound(indices, static_cast<int32_t>(short_group));
      if (found == indices.end() || static_cast<size_t>(*found) != short_group) return;
      lacking += lack;
      short_.push_back({static_cast<size_t>(found - indices.begin()), lacking});
    });
  }

  // The first value of the selected group `i`, or the number of values for their number.
  size_t of(size_t i) const {
    const auto after = std::ranges::lower_bound(short_, i, {}, &Short::selected);
    return i * group_ - (after == short_.begin() ? 0 : after[-1].lacking);
  }

 private:
  struct Short {
    size_t selected;  // its position in the selection
    size_t lacking;   // elements that it and those before it lack
  };

  size_t group_;
  std::vector<Short> short_;
};

// Throws InvalidArgument unless it is a packet of these groups, with the numbers of its header.
inline codec::GroupReader reader_of(const GroupPacket& packet, const GroupElements& all) {
  const codec::GroupReader reader({packet.bytes, packet.size});
  const codec::GroupHeader& header = reader.header();
  if (header.k != packet.k || header.values != packet.values || header.count != all.groups())
    throw InvalidArgument(
        "invalid packet of groups: its header has k = " + std::to_string(header.k) + " of " +
        std::to_string(header.count) + " groups and " + std::to_string(header.values) +
        " values, expected " + std::to_string(packet.k) + " of " + std::to_string(all.groups()) +
        " and " + std::to_string(packet.values));
  return reader;
}

// `count`: the elements of its groups.
inline void check_values(const GroupPacket& packet, size_t count) {
  if (count != packet.values)
    throw InvalidArgument("invalid packet of groups: it has " + std::to_string(packet.values) +
                          " values, which its groups do not have");
}

}  // namespace pycomm::kernels
