// The store for a later group: its ranks exchange their infos through the shared memory of their
// parent group, if that has one host, and do all else in the rendezvous store. A rank that finds no
// place in its segment uses the rendezvous store for its info, too, and the others find it there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "rendezvous/store.h"
#include "shared/shared_memory_region.h"

namespace pycomm::group {

class ParentStore final : public rendezvous::Store {
 public:
  // `region`: of all ranks of the parent.
  ParentStore(rendezvous::Store& store, shared::SharedMemoryRegion& region)
      : store_(store), region_(region) {}
  ~ParentStore() override { withdraw(); }
  ParentStore(const ParentStore&) = delete;
  ParentStore& operator=(const ParentStore&) = delete;

  // Through shared memory only, if there is a place. It stays there as long as this object.
  void exchange(const std::string& key, const std::string& value, Values& values,
                const Deadline& deadline) override;
  void get_missing(Values& values, const Deadline& deadline) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  std::optional<std::string> remove(const std::string& key, const Deadline& deadline) override;

  void set(const std::string& key, const std::string& value, const Deadline& deadline) override {
    store_.set(key, value, deadline);
  }
  int64_t add(const std::string& key, int64_t amount, const Deadline& deadline) override {
    return store_.add(key, amount, deadline);
  }
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline) override {
    return store_.claim(key, value, deadline);
  }
  bool limited() const override { return store_.limited(); }
  // Every rank has a place left, so that all have shown their infos here.
  bool shows_all() const override;

 private:
  bool publish(const std::string& key, const std::string& value);
  void withdraw();
  bool find(Values& values) const;
  bool wait_for(Values& values, const Deadline& deadline) const;

  rendezvous::Store& store_;
  shared::SharedMemoryRegion& region_;
  std::optional<size_t> place_;  // of the own info
  std::string key_;              // its key
};

}  // namespace pycomm::group
