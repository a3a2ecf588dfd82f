// Reads lists of arrays into the rows of a kernel's table in one pass. If it returns None,
// pycomm/kernels/rows.py checks each array and reports the error.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "bindings/core_arrays.h"
#include "bindings/kernels.h"

namespace pycomm::bindings {
namespace {

constexpr size_t kMostElements = std::numeric_limits<int32_t>::max();  // limit of an index

using Words = py::array_t<uint64_t>;

// An element of a list, which other threads may change: empty if it has no such element.
py::object element(const py::list& list, size_t i) {
  const auto index = static_cast<Py_ssize_t>(i);
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* const found = PyList_GetItemRef(list.ptr(), index);
#else
  PyObject* const found = Py_XNewRef(PyList_GetItem(list.ptr(), index));
#endif
  if (found == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

// What is known about the arrays of a call.
class Lists {
 public:
  explicit Lists(const py::tuple& lists)
      : count_(lists.empty() ? 0 : py::len(lists[0])),
        words_({count_, lists.size() + 1}),
        memory_({lists.size(), count_, size_t{2}}),
        dtypes_(lists.size()) {
    for (const py::handle list : lists) lists_.push_back(list.cast<py::list>());
  }

  // False unless all arrays are contiguous and match: arrays of a row have the same number of
  // elements and, unless flat, the same shape.
  bool read() {
    for (const py::list& list : lists_)
      if (list.size() != count_) return false;
    for (size_t row = 0; row < count_; ++row)
      if (!read_row(row)) return false;
    return true;
  }

  const Words& words() const { return words_; }
  const Words& memory() const { return memory_; }
  py::tuple dtypes() const {
    py::tuple names(dtypes_.size());
    for (size_t i = 0; i < dtypes_.size(); ++i) names[i] = py::str(name_of(dtypes_[i]));
    return names;
  }
  int gpu() const { return gpu_; }
  bool flat() const { return flat_; }  // whether all arrays are one-dimensional

 private:
  bool read_row(size_t row) {
    uint64_t* const words = words_.mutable_data(row);
    uint64_t& count = words[lists_.size()];
    shaped_ = false;
    for (size_t i = 0; i < lists_.size(); ++i) {
      const py::object array = element(lists_[i], row);
      if (!array) return false;
      const auto plain = read_array(array.ptr());
      if (!plain || plain->count > kMostElements) return false;
      if (row == 0) dtypes_[i] = plain->dtype;
      if (i == 0) count = plain->count;
      if (row == 0 && i == 0) gpu_ = plain->gpu;
      if (plain->dtype != dtypes_[i] || plain->gpu != gpu_ || plain->count != count ||
          !fits(plain->shape))
        return false;
      words[i] = reinterpret_cast<uintptr_t>(plain->data);
      *memory_.mutable_data(i, row, 0) = words[i];
      *memory_.mutable_data(i, row, 1) = count * bytes_of(dtypes_[i]);
    }
    return true;
  }

  bool fits(std::span<const int64_t> shape) {
    if (shape.size() == 1) return true;
    flat_ = false;
    if (!shaped_) shape_.assign(shape.begin(), shape.end());
    shaped_ = true;
    return std::equal(shape.begin(), shape.end(), shape_.begin(), shape_.end());
  }

  std::vector<py::list> lists_;
  size_t count_;  // number of rows
  Words words_;   // [rows, lists + 1]: addresses, then the elements per array of the row
  Words memory_;  // [lists, rows, 2]: addresses and bytes
  std::vector<Dtype> dtypes_;
  int gpu_ = ContiguousArray::kHost;
  bool flat_ = true;
  bool shaped_ = false;         // whether an array of this row has several dimensions
  std::vector<int64_t> shape_;  // of the first such array
};

// Returns (words, memory, dtypes by list, GPU or -1, whether all are flat), or None.
py::object rows(const py::tuple& given) {
  Lists lists(given);
  if (!lists.read()) return py::none();
  return py::make_tuple(lists.words(), lists.memory(), lists.dtypes(), lists.gpu(), lists.flat());
}

struct ArrayMemory {
  uint64_t begin;
  uint64_t bytes;
};

struct MemorySpan {
  uint64_t begin, end;
  bool written;
};

// A table in Python: (address, rows).
using Rows = std::pair<uintptr_t, size_t>;

// Whether written memory overlaps any other memory.
bool share_memory(const std::vector<Rows>& written, const std::vector<Rows>& read) {
  std::vector<MemorySpan> spans;
  for (const auto* tables : {&written, &read})
    for (const auto& [address, rows] : *tables)
      for (const ArrayMemory& memory : std::span(at<const ArrayMemory>(address), rows))
        if (memory.bytes != 0)
          spans.push_back({memory.begin, memory.begin + memory.bytes, tables == &written});
  std::sort(spans.begin(), spans.end(),
            [](const MemorySpan& a, const MemorySpan& b) { return a.begin < b.begin; });
  uint64_t end = 0, end_written = 0;  // of the spans so far
  for (const MemorySpan& span : spans) {
    if (span.begin < (span.written ? end : end_written)) return true;
    end = std::max(end, span.end);
    if (span.written) end_written = span.end;  // it begins after all others
  }
  return false;
}

}  // namespace

void bind_rows(py::module_& module) {
  module.def("rows", &rows);
  module.def("share_memory", &share_memory);
}

}  // namespace pycomm::bindings
