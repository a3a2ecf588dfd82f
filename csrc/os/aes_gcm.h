// AES-256-GCM (NIST SP 800-38D) of OpenSSL 3's libcrypto, which is loaded at the first use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace pycomm::os {

// The library of Python's ssl and hashlib modules; if one of them is imported, the same copy.
inline constexpr const char* kCryptoLibrary = "libcrypto.so.3";

struct CryptoLibrary;  // its functions
// Loads `name` once. Throws Unsupported if there is no such library or a function is missing.
const CryptoLibrary& crypto_library(const std::string& name = kCryptoLibrary);

// One direction of one connection with one key. Used by one thread at a time.
class AesGcm {
 public:
  static constexpr size_t kKeyBytes = 32, kNonceBytes = 12, kTagBytes = 16;
  enum class Direction : uint8_t { encrypt, decrypt };
  using Key = std::span<const uint8_t, kKeyBytes>;
  using Nonce = std::array<uint8_t, kNonceBytes>;
  using In = std::span<const std::byte>;

  AesGcm(Direction direction, Key key);
  void set_key(Key key);

  // Encrypts `first` and then `second` to `out`, followed by the tag. Use each nonce only once.
  void encrypt(const Nonce& nonce, In header, In first, In second, std::byte* out);
  // Decrypts `in`, which ends with the tag, to `out`. False: invalid tag, and `out` is zeroed.
  [[nodiscard]] bool decrypt(const Nonce& nonce, In header, In in, std::byte* out);

 private:
  struct Free {
    void operator()(void* context) const;
  };
  void begin(const Nonce& nonce, In header);

  const CryptoLibrary& library_;
  Direction direction_;
  std::unique_ptr<void, Free> context_;
};

}  // namespace pycomm::os
