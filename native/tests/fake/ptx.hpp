// As much of PTX as our kernels use, one warp at a time, on the CPU.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake {

// All lanes of a warp must go the same way at a branch.
class Ptx {
 public:
  explicit Ptx(const std::string& text);  // throws std::invalid_argument, naming a line it does not know
  const std::string& entry() const { return entry_; }
  size_t parameters() const { return parameters_.size(); }

  // One block of up to 32 threads. False: it touched memory that is nobody's, and went no further.
  bool run(uint32_t block, uint32_t threads, const std::vector<uint64_t>& arguments) const;

 private:
  enum class Verb {
    mov,
    add,
    sub,
    bit_and,
    bit_or,
    bit_xor,
    bit_not,
    max,
    shl,
    shr,
    mul,
    mad,
    xor3,
    selp,
    greater,
    greater_equal,
    equal,
    not_equal,
    load,
    store,
    branch,
    end
  };
  using Lanes = std::array<uint64_t, 32>;
  struct Instruction {
    Verb verb;
    int width = 4;        // bytes
    bool joined = false;  // of a comparison: and the last operand, too
    size_t guard = 0;     // register; 0: none
    bool guard_inverted = false;
    std::vector<size_t> operands;  // registers; constants have registers of their own
    uint64_t offset = 0;           // of an address
    size_t target = 0;             // of a branch
    std::string line;
  };
  size_t operand(const std::string& word, uint64_t* offset);
  size_t fresh(uint64_t value);
  Instruction instruction(std::string line);
  static uint64_t computed(Verb verb, int width, uint64_t a, uint64_t b, uint64_t c);
  bool move(const Instruction& now, std::vector<Lanes>& registers, uint32_t active) const;

  std::string entry_;
  std::vector<Lanes> registers_;  // as they are at the beginning
  std::map<std::string, size_t> names_, labels_;
  std::vector<size_t> parameters_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::vector<Instruction> program_;
};

}  // namespace fake
