// See tcp_store.h.
#include "rendezvous/tcp_store.h"

#include <optional>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"
#include "rendezvous/store_client.h"
#include "rendezvous/store_frame.h"
#include "rendezvous/store_server.h"

namespace pycomm::rendezvous {
namespace {

// The end at the server's process, which uses the keys themselves.
class ServedStore final : public TcpStore {
 public:
  explicit ServedStore(std::unique_ptr<StoreServer> server)
      : TcpStore(server->port()), server_(std::move(server)) {}

  void set(const std::string& key, const std::string& value, const Deadline&) override {
    check_sizes(key, value);
    server_->keys().set(key, value);
    server_->wake();
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    check_sizes(key, "");
    return server_->keys().get(key, deadline);
  }
  int64_t add(const std::string& key, int64_t amount, const Deadline&) override {
    check_sizes(key, "");
    const int64_t sum = server_->keys().add(key, amount);
    server_->wake();
    return sum;
  }
  std::optional<std::string> remove(const std::string& key, const Deadline&) override {
    check_sizes(key, "");
    return server_->keys().remove(key);
  }
  std::string claim(const std::string& key, const std::string& value, const Deadline&) override {
    check_sizes(key, value);
    std::string held = server_->keys().claim(key, value);
    server_->wake();
    return held;
  }
  void all_ranks_connected() override { server_->stop_listening(); }

 private:
  std::unique_ptr<StoreServer> server_;
};

}  // namespace

std::unique_ptr<TcpStore> TcpStore::serve(const std::string& host, uint16_t port,
                                          const std::string& key) {
  return std::make_unique<ServedStore>(
      std::make_unique<StoreServer>(os::tcp_address(host, port), key));
}

std::unique_ptr<TcpStore> TcpStore::connect(const std::string& host, uint16_t port,
                                            const std::string& key, const Deadline& deadline,
                                            StoreHooks hooks) {
  if (key.empty()) throw InvalidArgument("the key of a store is empty");
  return std::make_unique<StoreClient>(host, port, key, deadline, std::move(hooks));
}

void TcpStore::check_sizes(const std::string& key, const std::string& value) {
  if (key.empty() || key.size() > store_frame::kMaxKeyBytes)
    throw InvalidArgument("invalid key: a store's key must have 1 to " +
                          std::to_string(store_frame::kMaxKeyBytes) + " bytes, got " +
                          std::to_string(key.size()));
  if (value.size() > store_frame::kMaxValueBytes)
    throw InvalidArgument("invalid value of the key '" + key + "': it must have at most " +
                          std::to_string(store_frame::kMaxValueBytes) + " bytes, got " +
                          std::to_string(value.size()));
}

}  // namespace pycomm::rendezvous
