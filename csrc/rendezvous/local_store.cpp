// See local_store.h.
#include "rendezvous/local_store.h"

#include <limits>
#include <sstream>

#include "core/errors.h"

namespace pycomm {

void LocalStore::set(const std::string& key, const std::string& value) {
  set_within(key, value, std::numeric_limits<size_t>::max());
}

bool LocalStore::set_within(const std::string& key, const std::string& value, size_t max_bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto old = values_.find(key);
    const size_t freed = old == values_.end() ? 0 : key.size() + old->second.size();
    const size_t bytes = bytes_ - freed + key.size() + value.size();
    if (bytes > max_bytes) return false;
    values_[key] = value;
    bytes_ = bytes;
  }
  changed_.notify_all();
  return true;
}

std::string LocalStore::get(const std::string& key, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  while (!values_.contains(key)) {
    if (deadline.expired()) throw_key_timeout(key, deadline, "this process's store");
    changed_.wait_until(lock, Clock::now() + deadline.left());
  }
  return values_[key];
}

std::optional<std::string> LocalStore::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

void throw_key_timeout(const std::string& key, const Deadline& deadline, const std::string& store) {
  std::ostringstream text;
  text.precision(3);
  text << "nobody set the key '" << key << "' in " << store << " within " << deadline.limit_s()
       << " s";
  ErrorFields fields;
  fields.elapsed_s = deadline.elapsed_s();
  throw Timeout(text.str(), fields);
}

}  // namespace pycomm
