// See store.h.
#include "rendezvous/store.h"

#include "core/errors.h"

namespace pycomm::rendezvous {

void Store::get_missing(Values& values, const Deadline& deadline) {
  for (auto& [key, value] : values)
    if (!value) value = get(key, deadline);
}

void Store::exchange(const std::string& key, const std::string& value, Values& values,
                     const Deadline& deadline) {
  set(key, value, deadline);
  get_missing(values, deadline);
}

std::string get_in_slices(Store& store, const std::string& key, const Deadline& deadline,
                          const std::function<bool()>& interrupted) {
  for (;;) {
    const bool last = deadline.left() <= kPollInterval;
    try {
      return store.get(key, last ? deadline : Deadline(kPollInterval));
    } catch (const Timeout&) {  // the end of a slice
      if (last) throw;
    }
    if (interrupted && interrupted())
      throw GroupBroken("waiting for the key '" + key + "' was interrupted");
  }
}

}  // namespace pycomm::rendezvous
