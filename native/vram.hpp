// Memory of a device that is lent, returned and lent again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda.hpp"

namespace zs {

class Vram : public std::enable_shared_from_this<Vram> {
  struct Block {
    CUdeviceptr at = 0;
    size_t nbytes = 0;
    bool reserved = false;
  };

 public:
  // One block on loan; goes back by itself. Whoever lets go of it must know that the device is done with it.
  class Loan {
   public:
    Loan() = default;
    Loan(Loan&& other) noexcept { *this = std::move(other); }
    Loan& operator=(Loan&& other) noexcept;
    ~Loan() { give_back(); }
    CUdeviceptr at() const { return block_.at; }
    explicit operator bool() const { return block_.at != 0; }

   private:
    friend class Vram;
    Loan(std::shared_ptr<Vram> owner, Block block) : owner_(std::move(owner)), block_(block) {}
    void give_back() noexcept;
    std::shared_ptr<Vram> owner_;
    Block block_;
  };

  explicit Vram(std::shared_ptr<cuda::Context> context) : context_(std::move(context)) {}
  Vram(const Vram&) = delete;
  Vram& operator=(const Vram&) = delete;
  ~Vram();

  // Takes memory for blocks of so many bytes, for good; what was reserved before counts. Throws
  // Kind::capacity.
  void reserve(size_t nbytes, size_t block_bytes);
  size_t reserved() const;
  Loan lend_reserved(size_t nbytes);  // empty where none is idle or the blocks are too small
  Loan lend(size_t nbytes);           // takes more where needed; empty where there is none

 private:
  void take_back(const Block& block) noexcept;
  const std::shared_ptr<cuda::Context> context_;
  mutable std::mutex mutex_;
  std::vector<Block> idle_;
  std::vector<CUdeviceptr> taken_;
  size_t reserved_ = 0;
};

}  // namespace zs
