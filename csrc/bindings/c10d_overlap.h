// Whether calls that are made as one overlap in memory: a call of a list must not read what another
// call of the list has written.
//
// Exact: two columns of a matrix interleave but share nothing. Costs n log n for n tensors and, for
// tensors that interleave, the same for their contiguous runs.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pycomm::bindings {

// A tensor that a call reads or writes. `call` numbers the calls of a list.
struct Use {
  at::Tensor tensor;
  size_t call;
  bool written;
};

class MemoryOverlap {
 public:
  // Whether a call writes memory that another call reads or writes.
  static bool is_written_twice(const std::vector<Use>& uses) {
    std::vector<Run> bounds, runs;
    for (size_t i = 0; i < uses.size(); ++i) add_bounds(bounds, uses[i], i);
    if (!have_conflict(bounds)) return false;
    for (const Run& bound : bounds) add_runs(runs, uses[bound.use], bound);
    return have_conflict(runs);
  }

 private:
  struct Run {
    const char* begin;
    const char* end;
    size_t use, call;
    bool written;
  };
  // The largest end so far, and the largest of another call.
  struct Reach {
    const char* end = nullptr;
    const char* other_end = nullptr;
    size_t call = 0;

    const char* beside(size_t mine) const { return mine == call ? other_end : end; }
    void add(const Run& run) {
      if (run.call == call) {
        end = std::max(end, run.end);
      } else if (run.end > end) {
        other_end = std::exchange(end, run.end);
        call = run.call;
      } else {
        other_end = std::max(other_end, run.end);
      }
    }
  };

  static const char* address_of(const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.const_data_ptr());
  }

  static void add_bounds(std::vector<Run>& bounds, const Use& use, size_t index) {
    if (!use.tensor.defined() || use.tensor.numel() == 0) return;
    int64_t last = 0;
    for (int64_t d = 0; d < use.tensor.dim(); ++d)
      last += (use.tensor.size(d) - 1) * use.tensor.stride(d);
    const char* const begin = address_of(use.tensor);
    bounds.push_back(
        {begin, begin + (last + 1) * use.tensor.element_size(), index, use.call, use.written});
  }

  // The contiguous runs of a tensor; its bounds if it is contiguous.
  static void add_runs(std::vector<Run>& runs, const Use& use, Run bound) {
    using Dim = std::pair<int64_t, int64_t>;  // stride, size
    c10::SmallVector<Dim, 5> dims;
    for (int64_t d = 0; d < use.tensor.dim(); ++d)
      if (use.tensor.size(d) > 1 && use.tensor.stride(d) > 0)
        dims.emplace_back(use.tensor.stride(d), use.tensor.size(d));
    std::sort(dims.begin(), dims.end());
    int64_t width = 1;  // elements per run
    const Dim* outer = dims.begin();
    for (; outer != dims.end() && outer->first == width; ++outer) width *= outer->second;
    const int64_t bytes = use.tensor.element_size();
    std::vector<const char*> begins{bound.begin};
    for (; outer != dims.end(); ++outer) {
      const size_t inner = begins.size();
      for (int64_t i = 1; i < outer->second; ++i)
        for (size_t k = 0; k < inner; ++k) begins.push_back(begins[k] + i * outer->first * bytes);
    }
    for (const char* const begin : begins) {
      bound.begin = begin;
      bound.end = begin + width * bytes;
      runs.push_back(bound);
    }
  }

  static bool have_conflict(std::vector<Run>& runs) {
    std::sort(runs.begin(), runs.end(),
              [](const Run& a, const Run& b) { return a.begin < b.begin; });
    Reach used, written;
    for (const Run& run : runs) {
      const Reach& against = run.written ? used : written;
      if (const char* const end = against.beside(run.call); end != nullptr && run.begin < end)
        return true;
      used.add(run);
      if (run.written) written.add(run);
    }
    return false;
  }
};

}  // namespace pycomm::bindings
