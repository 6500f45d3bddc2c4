"""Many runs that answer one question: started and resumed (plan, runner), then compared with their uncertainty."""
