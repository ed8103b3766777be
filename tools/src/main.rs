//! The `remanent` command. What it does is in the library beside it, which tests call without a process.

fn main() -> std::process::ExitCode {
    remanent_tools::main()
}
