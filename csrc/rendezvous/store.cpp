// See store.h.
#include "rendezvous/store.h"

#include "core/errors.h"

namespace pycomm::rendezvous {

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
